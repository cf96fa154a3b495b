"""What `benchmarks/session.py` measures: the echo beside the allocator, and owners that send prepared steps."""
