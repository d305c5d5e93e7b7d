"""See train.py."""
