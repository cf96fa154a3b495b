"""Clients for asyncio and for threads. scripts/unasync.py generates the files for threads from those for asyncio."""
