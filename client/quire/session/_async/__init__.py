"""A session of unary calls. scripts/unasync.py generates the file for threads from the one for asyncio."""
