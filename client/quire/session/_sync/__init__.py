# Generated from _async/__init__.py by scripts/unasync.py. Change that file, then run `make format`.
"""A session of unary calls. scripts/unasync.py generates the file for threads from the one for asyncio."""
