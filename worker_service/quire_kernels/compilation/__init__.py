"""What is compiled: the specialisations that ship, and those that a model needs before its first request."""
