"""Retention: decides which blocks stay cached."""
