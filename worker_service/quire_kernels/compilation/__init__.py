"""Kernel specializations: the ones that ship, and the ones that a model needs before its first request."""
