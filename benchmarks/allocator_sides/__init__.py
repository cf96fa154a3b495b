"""What `benchmarks/allocator.py` measures: one module per side, and the work that all sides do."""
