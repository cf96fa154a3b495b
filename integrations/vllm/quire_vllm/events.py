"""vLLM's KV cache events for Quire's cached blocks: BlockStored, BlockRemoved, AllBlocksCleared.

Events go through the queue of vLLM's own block pool, so they get the fields that vLLM adds to its own events. A block
gets one event when it becomes hittable, and no second event while it stays hittable. vLLM's manager has one event for
each copy of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.request import Request

from quire_vllm.pool import PoolShape

DIGEST_BYTES: Final = 32


class CacheEvents:
    """Remembers the reported blocks by vLLM's hashes.

    Args:
        block_pool: vLLM's own block pool, which has the queue.
        shape: the pool's shape. A block has one event for each of its groups, as in vLLM's manager.
    """

    def __init__(self, block_pool: Any, shape: PoolShape) -> None:
        self._pool = block_pool
        self._digest_tokens = shape.digest_tokens
        self._sizes = [group.block_size for group in shape.groups]
        self._told: list[dict[bytes, Any]] = [{} for _ in self._sizes]  # for each group: digest -> vLLM's hash

    def stored(self, request: Request, first: int, end: int) -> None:
        """Reports the unreported blocks among the digests [first, end) of a request."""
        for group, size in enumerate(self._sizes):
            stride = size // self._digest_tokens
            self._stored(request, group, first // stride, end // stride)

    def _stored(self, request: Request, group: int, first: int, end: int) -> None:
        hashes, told = self._hashes(request, group), self._told[group]
        while first < end:
            stop = first
            while stop < end and _digest(hashes[stop]) not in told:
                told[_digest(hashes[stop])] = hashes[stop]
                stop += 1
            if stop > first:
                self._tell(request, group, first, stop)
            first = stop + 1

    def hit(self, request: Request, token_count: int) -> None:
        """Reports the blocks that a request hit, if the request wants events for all of its blocks."""
        if token_count and getattr(request, "kv_cache_report_mode", "incremental") == "full":
            for group, size in enumerate(self._sizes):
                self._pool.emit_cached_block_events(request, token_count // size, size, group)

    def removed(self, groups: Sequence[int], digests: bytes) -> None:
        """Reports that blocks of some groups can no longer be hit."""
        for group in groups:
            for start in range(0, len(digests), DIGEST_BYTES):
                told = self._told[group].pop(digests[start : start + DIGEST_BYTES], None)
                if told is not None:
                    self._pool.kv_event_queue.append(
                        BlockRemoved(
                            block_hashes=[maybe_convert_block_hash(told)], medium=self._pool.medium, group_idx=group
                        )
                    )

    def cleared(self) -> None:
        """Reports that no block can be hit until further events, or that the hittable blocks are unknown."""
        for told in self._told:
            told.clear()
        self._pool.kv_event_queue.append(AllBlocksCleared())

    def _hashes(self, request: Request, group: int) -> Any:
        """Returns for each block of a group the hash of its last hashed part."""
        stride = self._sizes[group] // self._digest_tokens
        return request.block_hashes if stride == 1 else request.block_hashes[stride - 1 :: stride]

    def _tell(self, request: Request, group: int, first: int, end: int) -> None:
        size, hashes, place, extra_keys = self._sizes[group], self._hashes(request, group), 0, []
        for number in range(end):
            keys, place = generate_block_hash_extra_keys(request, number * size, (number + 1) * size, place)
            if number >= first:
                extra_keys.append(keys)
        self._pool.kv_event_queue.append(
            self._pool._build_block_stored_event(
                request,
                block_hashes=[maybe_convert_block_hash(each) for each in hashes[first:end]],
                parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
                start_token_idx=first * size,
                end_token_idx=end * size,
                block_size=size,
                kv_cache_group_id=group,
                extra_keys_list=extra_keys,
            )
        )


def _digest(block_hash: bytes) -> bytes:
    return bytes(block_hash).ljust(DIGEST_BYTES, b"\0")
