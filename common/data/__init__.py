"""Which samples form which batch, in which order, and how the batches reach the device.

A sample depends on (seed, epoch, index) only. Nothing here knows the model or the optimizer. This
room uses the run's folder only to keep the measured number of loading processes.
"""
