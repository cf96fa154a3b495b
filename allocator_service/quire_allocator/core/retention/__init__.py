"""Stops: where hits may end, what is known of each, and what a pool learns of where prompts part."""
