"""Branches over HTTP: the calls of `quire.AsyncBranch`, for programs in any language.

1. bodies      the bodies of requests (`bodies`)
2. held        the branches of callers, each with the worker that holds it (`held`)
3. endpoints   prefill, fork, extend, score, generate, release (`endpoints`)
"""
