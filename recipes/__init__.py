"""Recipes: one folder each, listed by `python -m recipes`."""

from common import cli  # noqa: F401 - sets what must be set before torch is imported
