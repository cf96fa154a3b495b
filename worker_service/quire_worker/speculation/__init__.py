"""Speculative decoding: makes drafts from a sample's own text, or with a draft model."""
