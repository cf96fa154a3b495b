# Generated from _async/__init__.py by scripts/unasync.py. Change that file, then run `make format`.
"""Clients for asyncio. scripts/unasync.py turns these files into the clients for threads, in `_sync`."""
