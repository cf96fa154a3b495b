"""vLLM's schedulers with Quire's manager in place of vLLM's."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from quire_vllm.embedded import EmbeddedPool
from quire_vllm.manager import NULL_BLOCKS, QuireCacheManager
from quire_vllm.metrics import serve_metrics
from quire_vllm.options import Options, options_of
from quire_vllm.pool import PoolShape, pool_shape
from quire_vllm.releases import check_release
from quire_vllm.support import check_engine

log = logging.getLogger("vllm.quire_vllm")  # inherits level and format from vLLM's logger


class _OnQuire(Scheduler):
    """The differences of both schedulers from vLLM's."""

    kv_cache_manager: QuireCacheManager

    def __init__(self, *arguments: Any, **options: Any) -> None:
        check_release()
        super().__init__(*arguments, **options)
        check_engine(self.vllm_config, self.kv_cache_config, hash_block_size=self.hash_block_size)
        chosen = options_of(self.vllm_config)
        shape = pool_shape(self.vllm_config, self.kv_cache_config, first_block=NULL_BLOCKS)
        pool = _pool(shape, chosen)
        if chosen.metrics:
            serve_metrics(pool, chosen)
        _log_choice(pool, chosen)
        self.kv_cache_manager = QuireCacheManager(
            pool,
            self,
            kv_cache_config=self.kv_cache_config,
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.vllm_config.max_in_flight_tokens,
            enable_caching=self.cache_config.enable_prefix_caching,
            enable_kv_cache_events=shape.tells_removed,
            log_stats=self.log_stats,
            scheduler_block_size=self.block_size,
            hash_block_size=self.hash_block_size,
        )

    def _ec_transfer_pending(self, request: Request, num_computed_tokens: int) -> bool:
        """Skips a request for this turn if another request is computing its prefix. vLLM calls this method right after
        each lookup. A request that waits for an image holds no blocks during that time."""
        if self.kv_cache_manager.is_passed_over(request):
            return True
        if not super()._ec_transfer_pending(request, num_computed_tokens):
            return False
        self.kv_cache_manager.give_up(request)
        return True

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Ends passes of prompts at each block edge, so that every published block has a state."""
        count: int = super()._mamba_block_aligned_split(
            request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
        )
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        size: int = self.cache_config.block_size
        return min(count, size - start % size)

    def shutdown(self) -> None:
        """Shuts the scheduler down and gives the pool back."""
        super().shutdown()
        self.kv_cache_manager.pool.close()


def _pool(shape: PoolShape, options: Options) -> Any:
    """Makes the chosen pool. Imports gRPC only for a pool at an allocator."""
    if not options.allocator:
        return EmbeddedPool(shape)
    from quire_vllm.remote import RemotePool

    return RemotePool(shape, options)


def _log_choice(pool: Any, options: Options) -> None:
    """Logs which core decides over the blocks, and where its metrics are."""
    where = f"at the allocator {options.allocator}" if options.allocator else "in this process"
    metrics = f"metrics at http://{options.metrics}/metrics" if options.metrics else "no metrics of its own"
    log.info(
        "Quire's block manager is in use: pool %s with %d blocks, %s core %s, %s",
        *(options.pool, pool.shape.block_count, pool.core, where, metrics),
    )


class QuireScheduler(_OnQuire):
    """Runs one pass after another; for `--scheduler-cls quire_vllm.QuireScheduler`."""


class QuireAsyncScheduler(_OnQuire, AsyncScheduler):
    """Schedules the next pass during the current one; for `--scheduler-cls quire_vllm.QuireAsyncScheduler`."""
