"""Beam search: which continuations of which texts are kept, and what that means for the samples that hold blocks."""
