"""The compiled specializations: those that ship, and those that a model needs before its first request."""
