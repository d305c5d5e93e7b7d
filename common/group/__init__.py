"""The process group: devices and cores, rendezvous of the ranks, and what they tell each other.

Nothing here knows what is trained. Gradients are averaged in `training`.
"""
