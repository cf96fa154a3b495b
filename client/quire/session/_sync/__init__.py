# Generated from _async/__init__.py by scripts/unasync.py. Change that file, then run `make format`.
"""A session of unary calls, for asyncio. scripts/unasync.py turns it into the session for threads, in `_sync`."""
