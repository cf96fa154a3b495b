"""LoRA (https://arxiv.org/abs/2106.09685): small changes of a model. Each request may choose one adapter.

    y = W x + scale * B A x        A [rank, inputs], B [outputs, rank], for the tokens of requests with that adapter

From the bytes up: `adapter` holds the tensors, `sites` applies them inside the model's layers, `peft_folder` reads and
checks an adapter that the PEFT library has saved.
"""
