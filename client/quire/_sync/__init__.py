# Generated from _async/__init__.py by scripts/unasync.py. Change that file, then run `make format`.
"""Clients for asyncio and for threads. scripts/unasync.py generates the files for threads from those for asyncio."""
