"""The sides of `benchmarks/hybrid.py`, one module each, shapes of models, and the requests of all sides."""
