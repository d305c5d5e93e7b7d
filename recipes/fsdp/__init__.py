"""See train.py."""

LAUNCHED = "ranks"  # see recipes/__main__.py
