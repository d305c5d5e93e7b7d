"""The ranks together. Nothing here knows what is trained: `training` averages gradients."""
