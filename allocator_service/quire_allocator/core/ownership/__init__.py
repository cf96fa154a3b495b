"""Which owner holds which pool, and what was answered to it."""
