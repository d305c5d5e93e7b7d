"""What a run leaves to resume from: written atomically, and checked before it is used.

`state` copies the training state after a step and loads it again, `snapshot_files` writes and finds
its files, `checked` puts a checksum into a file's name, `shards` divides tensors between ranks, and
`fits` refuses a state of another model or optimizer. Knows nothing of the run that writes.
"""
