"""Branches over HTTP: what `quire.AsyncBranch` has, for programs in any language.

1. bodies      what is asked (`bodies`)
2. held        the branches of callers, each at the worker that holds it (`held`)
3. endpoints   prefill, fork, extend, score, generate, release (`endpoints`)
"""
