"""The sides of `benchmarks/hybrid.py`, one module each, the models' shapes, and the requests of all sides."""
