"""The sides of `benchmarks/load.py`, and the requests that all of them get."""
