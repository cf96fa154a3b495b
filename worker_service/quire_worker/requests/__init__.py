"""Requests at the engine: how they are admitted to the queue, take tokens, and deliver them to their callers."""
