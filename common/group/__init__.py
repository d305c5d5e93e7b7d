"""The process group: devices and cores, the meeting of the ranks, and what they tell each other.

Nothing here knows what is trained. Gradients are averaged elsewhere (`training`).
"""
