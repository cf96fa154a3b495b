"""Kernel specializations: the shipped ones, and the additional ones that a model needs before its first request."""
