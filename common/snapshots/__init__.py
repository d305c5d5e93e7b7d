"""What a run leaves to resume from: written atomically, and checked before it is used.

`state` copies the training state after a step and loads it again, `files` writes and finds its
files, `checked` puts a checksum into a file's name, and `shards` divides tensors between ranks.
Knows nothing of the run that writes.
"""
