"""What `benchmarks/hybrid.py` measures: one module per side, the shapes of models, and the requests that all sides get."""
