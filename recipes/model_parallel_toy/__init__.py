"""See train.py."""

LAUNCHED = "stages"  # see recipes/__main__.py
