"""Speculative decoding: where drafts come from, a sample's own text or a draft model."""
