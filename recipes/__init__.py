"""Recipes: one folder each, listed by `python -m recipes`."""
