"""Which samples form which batch, in which order, and how they come to the device.

A sample depends on (seed, epoch, index) alone. Nothing here knows the model, the optimizer or the
run's folder.
"""
