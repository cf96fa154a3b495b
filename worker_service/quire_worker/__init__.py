"""The worker: a model whose KV cache lies in pages, and the loop that serves text from it.

The modules from the bytes up; each knows only the modules above it:

    cache              the physical pages: buffers that one layer of every group shares, and each layer's view of them
    attention          writing keys and values into pages and attending over them
    batch              chunks of several sequences laid out as one flat forward pass
    checkpoint         a folder of weights: what is in it, and its fingerprint
    support            checks that a model consists of parts that can be served from pages
    transformers_seam  how the attention of a transformers model reaches the pages
    model              loads, checks and runs a model
    sampling           logits to tokens
    tokenizer          text to tokens, and tokens back to text piece by piece

None of these imports grpc or knows of requests.
"""


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire._distribution import VERSION

    return VERSION
