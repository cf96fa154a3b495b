"""Quire's block manager in vLLM's engine. vLLM's own option selects it, and no file of vLLM changes:

vllm serve MODEL --scheduler-cls quire_vllm.QuireScheduler
"""

from quire._distribution import VERSION as __version__

from quire_vllm.scheduler import QuireAsyncScheduler, QuireScheduler

__all__ = ["QuireAsyncScheduler", "QuireScheduler", "__version__"]
