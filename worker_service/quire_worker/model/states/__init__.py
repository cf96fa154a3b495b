"""Recurrent layers on pages: their view of the cache, and the cutting of a flat batch into sequences for them."""
