"""The sides of `benchmarks/session.py`: the echo beside the allocator, and owners that send prepared steps."""
