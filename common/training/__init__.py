"""What is trained: models, the optimizer's options, how gradients are averaged, evaluation.

Nothing here knows where the data come from or what a run leaves.
"""
