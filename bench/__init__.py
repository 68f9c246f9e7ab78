"""Benchmarks, run from the repository; docs/benchmarks.md says which command answers what."""
