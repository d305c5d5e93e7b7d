"""Recipes: one folder each, listed by `python -m recipes`."""

import gc
import os

# What is imported at the start is no garbage, and looking for it among a million objects takes a
# fifth of the start. `common.run.loop` goes back to Python's own threshold when training begins.
gc.set_threshold(100_000, 10, 10)

# Before torch is imported: it warns of every connection from a host without a reverse name.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
