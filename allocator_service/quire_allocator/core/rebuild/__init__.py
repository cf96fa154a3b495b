"""Makes a pool of its owner's block report, after this allocator lost it."""
