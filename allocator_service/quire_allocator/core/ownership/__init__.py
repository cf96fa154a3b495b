"""Ownership: the owner of each pool, and the answers that it got."""
