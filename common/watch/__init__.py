"""Runs that watch themselves: a rank that hangs, and a rank that is slow, are named in one line.

`record` writes down where a rank is, `verdict` finds from all ranks' records which one did not
come, `stragglers` compares how long the ranks compute. Nothing here changes what is trained.
Importing `verdict` imports no torch.
"""
