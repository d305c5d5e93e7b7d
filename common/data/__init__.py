"""Which samples form which batch, in which order, and how they come to the device.

A sample depends on (seed, epoch, index) alone. Nothing here knows the model or the
optimizer; of the run it is given a folder, for the number of loading processes that was measured.
"""
