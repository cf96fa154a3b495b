"""A session of unary calls, for asyncio. scripts/unasync.py turns it into the session for threads, in `_sync`."""
