"""Recipes: one folder each, listed by `python -m recipes`."""

from common import cli  # noqa: F401 - sets what torch reads when it is imported
