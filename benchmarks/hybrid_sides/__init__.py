"""What `benchmarks/hybrid.py` measures: a module per side, shapes of models, and the requests that all sides get."""
