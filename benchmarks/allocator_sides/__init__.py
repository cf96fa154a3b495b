"""The sides of `benchmarks/allocator.py`, one module each, and the work that all of them do."""
