"""A transformers model on pages: its folder, what is supported, its batches and its tokenizer."""

import logging

# transformers imports torchao if it is installed. torchao then reports a missing GPU on standard error, and torch warns
# about torchao, both in the middle of the worker's log.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
