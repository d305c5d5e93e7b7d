"""What a run leaves and how it goes on: its folder, its record, snapshots, stop and resume.

The recipe calls it between two steps. Nothing here computes a gradient.
"""
