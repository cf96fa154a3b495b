"""vLLM's KVCacheManager in process, driven as its scheduler drives it, with its own groups and page sizes.

vLLM's `prefix_cache_retention_interval` (0.33) has two values here. None is *dense*: vLLM caches every full block of
sliding windows and every state at a block edge. 0, the default, is *sparse*. vLLM then caches the blocks of windowed
groups that a hit at the end of a prompt needs, and the state at the last block edge before it. At a junction, where
only full attention continues, vLLM caches both as well. The other blocks get no hash, so they are free as soon as they
fall out of the window. The scheduler ends a chunk at a junction, so that its state exists.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any, Final

from quire.planning import LayerSpec
from quire.types import GroupKind

from hybrid_sides.shapes import Shape
from hybrid_sides.workloads import DIGEST_BYTES, Request

VERSION: Final = "0.33.0"
BLOCK_TOKENS: Final = 16  # vLLM's default block size
MODEL_TOKENS_MAX: Final = 262_144
RETENTION_INTERVALS: Final[dict[str, int | None]] = {"dense": None, "sparse": 0}


class VllmSide:
    """vLLM's manager, with the part of its scheduler that one request at a time needs.

    Raises ImportError where vLLM cannot be imported.

    Attributes:
        refused_count: requests that got too few blocks; none of their tokens count as hits.
    """

    def __init__(self, shape: Shape, pool_bytes: int, chunk_tokens: int, retention: str) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_planning import _get_kv_cache_groups_uniform_page_size
        from vllm.v1.kv_cache_interface import KVCacheConfig

        specs = _layer_specs(shape)
        groups = _get_kv_cache_groups_uniform_page_size(specs)
        page_bytes = max(sum(specs[name].page_size_bytes for name in group.layer_names) for group in groups)
        (self._block_tokens,) = {group.kv_cache_spec.block_size for group in groups}
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=pool_bytes // page_bytes,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=RETENTION_INTERVALS[retention],
            ),
            max_model_len=MODEL_TOKENS_MAX,
            scheduler_block_size=self._block_tokens,
            hash_block_size=self._block_tokens,
            max_in_flight_tokens=chunk_tokens,
        )
        self.refused_count = 0
        self._sampling = SamplingParams(max_tokens=MODEL_TOKENS_MAX)
        self._scheduler = _scheduler(specs, self._block_tokens, chunk_tokens) if shape.state_bytes else None
        self._chunk_tokens = chunk_tokens
        self._names = map(str, count())

    def serve(self, request: Request) -> int:
        """Runs one request to its end; returns how many tokens of its prompt were cached."""
        from vllm.v1.request import Request as VllmRequest
        from vllm.v1.request import RequestStatus

        hashes = _Dealt(request.digests(self._block_tokens), self._block_tokens)
        tokens = [0] * request.prompt_token_count
        served = VllmRequest(next(self._names), tokens, self._sampling, None, block_hasher=hashes)
        hit, matched, served.shared_prefix_boundary = self.manager.get_computed_blocks(served)
        is_done = self._step(served, request.prompt_token_count - matched, matched, hit)
        served.status = RequestStatus.RUNNING
        while is_done and served.num_computed_tokens < request.computed_token_count:
            done = served.num_computed_tokens
            if done >= request.prompt_token_count:  # Decodes up to the next block edge, where the pool changes.
                new = min(self._block_tokens - done % self._block_tokens, request.computed_token_count - done)
                served.append_output_token_ids([0] * (done + new - served.num_tokens))
            is_done = self._step(served, served.num_tokens - done)
        self.manager.free(served)
        if not is_done:
            self.refused_count += 1
            return 0
        return int(matched)

    def _step(self, request: Any, token_count: int, matched: int = 0, hit: Any = None) -> bool:
        """Computes a chunk of at most `token_count` tokens; returns whether the chunk fits."""
        self.manager.new_step_starts()
        token_count = min(token_count, self._chunk_tokens)
        if self._scheduler is not None:
            token_count = self._scheduler(request, token_count, matched)
        granted = self.manager.allocate_slots(
            request,
            token_count,
            num_new_computed_tokens=matched,
            new_computed_blocks=hit,
            full_sequence_must_fit=hit is not None,
        )
        self.manager.take_boundary_state_offloads()
        if granted is None:
            return False
        request.num_computed_tokens += matched + token_count
        return True


class _Dealt:
    """Replaces hashing by digests that were made beforehand."""

    def __init__(self, digests: bytes, block_tokens: int) -> None:
        self._dealt = [digests[first : first + DIGEST_BYTES] for first in range(0, len(digests), DIGEST_BYTES)]
        self._block_tokens = block_tokens

    def __call__(self, request: Any) -> list[bytes]:
        return self._dealt[len(request.block_hashes) : request.num_tokens // self._block_tokens]


def _layer_specs(shape: Shape) -> dict[str, Any]:
    """Returns a specification per layer, with vLLM's block sizes. In models with states, a block of attention is as
    large as a state, so that all pages are equal."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    token_bytes = max(layer.token_bytes for layer in shape.layers)
    state_bytes = max(layer.state_bytes for layer in shape.layers)
    block = max(1, -(-state_bytes // (BLOCK_TOKENS * token_bytes))) * BLOCK_TOKENS

    def spec(layer: LayerSpec) -> Any:
        if layer.kind is GroupKind.STATE:
            return MambaSpec(
                block_size=block,
                shapes=((layer.state_bytes,),),
                dtypes=(torch.int8,),
                page_size_padded=block * token_bytes,
                mamba_cache_mode="align",
            )
        attention: Any = {
            "block_size": block,
            "num_kv_heads": layer.kv_head_count,
            "head_size": layer.head_dim,
            "dtype": torch.bfloat16,
        }
        if layer.window:
            return SlidingWindowSpec(sliding_window=layer.window, **attention)
        return FullAttentionSpec(**attention)

    return {f"layer.{layer.layer}": spec(layer) for layer in shape.layers}


def _scheduler(specs: dict[str, Any], block_tokens: int, chunk_tokens: int) -> Any:
    """Returns the method of vLLM's scheduler that ends chunks where a state is kept, bound to the attributes that it
    reads.

    States are written at the ends of chunks, as with kernels that cannot save a state inside a chunk. This method takes
    one more pass and keeps the same states.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    settings = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_tokens),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        max_num_scheduled_tokens=chunk_tokens,
        hash_block_size=block_tokens,
        block_size=block_tokens,
        use_eagle_block_drop=False,
        num_hash_lookahead_tokens=0,
        mamba_partial_cache_hit=False,
        mamba_shared_prefix_checkpoint=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None,
    )
    return lambda request, token_count, matched: Scheduler._mamba_block_aligned_split(
        settings, request, token_count, matched
    )
