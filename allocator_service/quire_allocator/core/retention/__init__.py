"""Which blocks stay cached, and why."""
