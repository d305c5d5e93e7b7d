"""See train.py."""

LAUNCHED = "spawn"  # see recipes/__main__.py
