"""LoRA (https://arxiv.org/abs/2106.09685): small changes of a model that each request chooses, or does without.

    y = W x + scale * B A x        A [rank, inputs], B [outputs, rank], for the tokens of requests with that adapter

From the bytes up: `adapter` is what one consists of, `sites` where a model takes it in, `peft_folder` reads and checks
what the library PEFT has saved.
"""
