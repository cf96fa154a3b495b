"""A transformers model on pages: its folder, what is supported, its batches and its tokenizer."""
