"""Readers that never change a pool: the index for watchers, memory usage, and the invariants."""
