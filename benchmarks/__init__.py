"""Benchmarks against what is not part of the project."""
