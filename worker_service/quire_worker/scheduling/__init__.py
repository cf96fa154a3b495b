"""Which tokens go through the model next, and what the allocator is asked for. Pure: it knows no device and no wire."""
