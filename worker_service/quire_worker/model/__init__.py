"""A transformers model on pages: its folder, what is supported, its batches and its tokenizer."""

import logging

# transformers imports torchao wherever it is installed, which says on standard error that this machine has no GPU, and
# makes torch complain of it, in the middle of the worker's log.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
