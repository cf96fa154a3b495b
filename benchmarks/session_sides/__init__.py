"""The sides of `benchmarks/session.py`: the echo server, the allocator, and owners that send prepared steps."""
