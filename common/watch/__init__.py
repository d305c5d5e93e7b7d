"""Runs that watch themselves. Nothing here changes what is trained; `verdict` needs no torch."""
