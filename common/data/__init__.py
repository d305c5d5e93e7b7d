"""Which samples form which batch, in which order, and how they come to the device.

A sample depends on (seed, epoch, index) alone. Nothing here knows the model or the
optimizer. The run's folder is passed in, only to keep the measured number of loading processes.
"""
