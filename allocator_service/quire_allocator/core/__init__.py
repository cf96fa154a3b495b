"""Pure state machines of the allocator: time and randomness come in as arguments."""
