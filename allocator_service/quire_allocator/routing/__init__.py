"""Chooses the worker of a prompt: the rule, the reservations of each pool, and the router over all pools. Pure."""
