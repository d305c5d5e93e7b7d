"""Beside training: `doctor` and `reproduce`, and what measures and compares recipes."""
