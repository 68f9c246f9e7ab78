"""Benchmarks; each module is run from the repository with ``python -m bench.<name>``."""
