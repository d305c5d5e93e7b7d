"""See train.py."""

LAUNCHED = "one"  # see recipes/__main__.py
