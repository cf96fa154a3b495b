"""Triton kernels for paged attention, in the words and shapes of FlashInfer."""
