"""The sides of `benchmarks/gateway.py`."""
