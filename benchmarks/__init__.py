"""Benchmarks, to be run from the repository: `python -m benchmarks.NAME --help`."""
