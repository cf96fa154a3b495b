"""Requests at the engine: how they are taken in, may wait, take tokens, and hand these out."""
