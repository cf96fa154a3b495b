"""Recurrent layers on pages: the cache that they see, and the cutting of a flat batch into sequences for them."""
