"""vLLM's KVCacheManager, called as its scheduler calls it: look up, allocate, count as computed, free.

Three things do not count against vLLM: making the `Request` (0.2 ms at 32 k tokens), appending tokens to it, and its
hashes, except in the row of hashing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from allocator_sides.workload import (
    BLOCK_TOKENS,
    DECODE_STEPS,
    DECODES,
    DIGEST_BYTES,
    HASH_COUNT,
    LONG_HIT_TOKENS,
    LONG_TOKENS,
    POOL_BLOCKS,
    SEQUENCES,
    SHORT_COUNT,
    SLIDING_GROUPS,
    WINDOW_TOKENS,
    Costs,
    Decoded,
    Operation,
    Round,
    cpu_us,
)

VERSION: Final = "0.33.0"
MODEL_TOKENS_MAX: Final = 131_072
BlockHasher = Callable[[Any], list[bytes]]


class VllmSide:
    """The baseline. Raises ImportError where vLLM cannot be imported."""

    name = "vllm"

    def __init__(self, decoded: list[Decoded]) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.version: str = vllm.__version__
        self._hasher: BlockHasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._sampling = SamplingParams(max_tokens=MODEL_TOKENS_MAX)
        self._names = map(str, count())
        self._decoding = {sliding: self._start_decoding(sliding, decoded) for sliding in SLIDING_GROUPS}

    def measure(self, work: Round) -> Costs:
        """Runs one round of all operations."""
        costs = self._long_prompts(work)
        request = self._request(work.tokens)
        costs[Operation.HASH], _ = cpu_us(self._hasher, [(request,)] * HASH_COUNT)
        costs[Operation.SHORT] = self._short_prompts(work)
        for sliding, operation in DECODES.items():
            costs[operation] = self._decode(*self._decoding[sliding])
        return costs

    def _long_prompts(self, work: Round) -> Costs:
        manager = _manager(sliding=0)
        costs: Costs = {}
        unnamed = [self._request([0] * LONG_TOKENS) for _ in work.prompts]  # Uses all memory once, like `CoreSide`.
        assert [_admit(manager, request) for request in unnamed] == [0] * len(unnamed)
        cpu_us(manager.free, [(request,) for request in unnamed])

        def admit(prompts: list[bytes]) -> tuple[float, list[tuple[Any, ...]], list[int]]:
            calls = [(manager, self._request([0] * LONG_TOKENS, _dealt(digests))) for digests in prompts]
            cost, computed = cpu_us(_admit, calls)
            return cost, [(request,) for _, request in calls], computed

        costs[Operation.ADMIT], held, _ = admit(work.prompts)
        costs[Operation.FREE], _ = cpu_us(manager.free, held)
        costs[Operation.ADMIT_HIT], held, computed = admit(work.prompts)
        assert set(computed) == {LONG_HIT_TOKENS}
        cpu_us(manager.free, held)
        for digests in work.fillers:
            cpu_us(manager.free, admit([digests])[1])
        costs[Operation.ADMIT_EVICTING], _, computed = admit(work.newcomers)
        assert set(computed) == {0}
        return costs

    def _short_prompts(self, work: Round) -> float:
        manager = _manager(sliding=0)

        def admit_and_free(tokens: list[int]) -> None:
            request = self._request(tokens, self._hasher)
            _admit(manager, request)
            manager.free(request)

        assert len(work.short) == SHORT_COUNT
        return cpu_us(admit_and_free, [(tokens,) for tokens in work.short])[0]

    def _start_decoding(self, sliding: int, decoded: list[Decoded]) -> tuple[Any, list[Any]]:
        manager = _manager(sliding)
        requests = []
        for sequence in decoded:
            request = self._request([0] * sequence.prompt_tokens, _dealt(sequence.digests))
            _admit(manager, request)
            request.num_computed_tokens = sequence.prompt_tokens
            request.append_output_token_ids(0)
            requests.append(request)
        return manager, requests

    def _decode(self, manager: Any, requests: list[Any]) -> float:
        """Returns the microseconds per sequence and step."""
        spent_ns = 0
        for _ in range(DECODE_STEPS):
            started = time.thread_time_ns()
            manager.new_step_starts()
            for request in requests:
                blocks = manager.allocate_slots(request, 1)
                blocks.get_block_ids(allow_none=True)
                request.num_computed_tokens += 1
            spent_ns += time.thread_time_ns() - started
            for request in requests:
                request.append_output_token_ids(0)
        return spent_ns / 1_000 / DECODE_STEPS / SEQUENCES

    def _request(self, tokens: list[int], hasher: BlockHasher | None = None) -> Any:
        from vllm.v1.request import Request

        return Request(next(self._names), tokens, self._sampling, None, block_hasher=hasher)


def _manager(sliding: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    page: Any = {"block_size": BLOCK_TOKENS, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    specs = [FullAttentionSpec(**page)]
    specs += [SlidingWindowSpec(sliding_window=WINDOW_TOKENS, **page)] * sliding
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=POOL_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=MODEL_TOKENS_MAX,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


def _admit(manager: Any, request: Any) -> int:
    """Gives a request all its blocks; returns the tokens that were cached."""
    hit, computed, _ = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(request, request.num_tokens - computed, computed, hit)
    assert blocks is not None, "no space"
    blocks.get_block_ids()
    return int(computed)


def _dealt(digests: bytes) -> BlockHasher:
    """Replaces hashing by digests that were made beforehand."""
    dealt = [digests[first : first + DIGEST_BYTES] for first in range(0, len(digests), DIGEST_BYTES)]

    def hasher(request: Any) -> list[bytes]:
        return dealt[len(request.block_hashes) : request.num_tokens // BLOCK_TOKENS]

    return hasher
