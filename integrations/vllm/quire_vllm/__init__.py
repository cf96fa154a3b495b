"""Quire's block manager in vLLM's engine, by vLLM's own option and without a change of any of its files:

vllm serve MODEL --scheduler-cls quire_vllm.QuireScheduler
"""

from quire._distribution import VERSION as __version__

from quire_vllm.scheduler import QuireAsyncScheduler, QuireScheduler

__all__ = ["QuireAsyncScheduler", "QuireScheduler", "__version__"]
