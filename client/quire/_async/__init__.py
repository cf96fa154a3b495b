"""Clients for asyncio. scripts/unasync.py turns these files into the clients for threads, in `_sync`."""
