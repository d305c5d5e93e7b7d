"""Recipes: one folder each, listed by `python -m recipes`."""

import os

# Before torch is imported: it warns of every connection from a host without a reverse name.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
