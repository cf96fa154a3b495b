"""What reads a pool and never changes it: the index for watchers, memory usage, and the invariants."""
