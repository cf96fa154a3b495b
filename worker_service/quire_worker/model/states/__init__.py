"""Recurrent layers on pages: what they may ask their cache, and how a flat batch is cut for them."""
