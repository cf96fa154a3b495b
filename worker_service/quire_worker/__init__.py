"""The worker: a model with its KV cache in pages, and the loop that serves text from it.

`.importlinter` says which folder may import which. A request passes through them in this order:

    service, calls     checks a message, and answers it
    requests           makes samples of a request, and hands out what they give
    engine.py          turns: plan, ask the allocator, run a pass, commit
    scheduling         what a turn asks for: admissions, growth, preemption, passes
    execution          runs a pass on the model's thread
    model, attention   the forward pass, and attention over the pages of `cache.py`
    sampling           logits to tokens

`attention`, `model`, `sampling` and `cache.py` know nothing of grpc or of requests.
"""


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire._distribution import VERSION

    return VERSION
