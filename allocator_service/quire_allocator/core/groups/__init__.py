"""One manager for each kind of attention group, and the coordinator that puts them together."""
