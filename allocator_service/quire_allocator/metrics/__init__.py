"""Counters of the allocator, and their export to Prometheus."""
