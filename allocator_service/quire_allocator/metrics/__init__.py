"""What the allocator counts, and how Prometheus reads it."""
