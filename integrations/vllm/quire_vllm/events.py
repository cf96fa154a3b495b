"""vLLM's KV cache events, of what Quire has cached: BlockStored, BlockRemoved, AllBlocksCleared.

They go through the queue of vLLM's own block pool, and so get what vLLM adds to its own. A block is told of when it
can be hit, and no second time while it can: vLLM's manager tells of each copy.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.request import Request

GROUP: Final = 0
DIGEST_BYTES: Final = 32


class CacheEvents:
    """Knows what was told, by vLLM's hashes.

    Args:
        block_pool: vLLM's own, which has the queue.
        block_size: tokens of a block.
    """

    def __init__(self, block_pool: Any, block_size: int) -> None:
        self._pool = block_pool
        self._block_size = block_size
        self._told: dict[bytes, Any] = {}  # by digest, vLLM's hash

    def stored(self, request: Request, first: int, end: int) -> None:
        """Tells of the blocks [first, end) of a request, as far as nobody was told."""
        hashes = request.block_hashes
        while first < end:
            stop = first
            while stop < end and _digest(hashes[stop]) not in self._told:
                self._told[_digest(hashes[stop])] = hashes[stop]
                stop += 1
            if stop > first:
                self._tell(request, first, stop)
            first = stop + 1

    def hit(self, request: Request, block_count: int) -> None:
        """Tells of the blocks that a request hit, where it wants all of its blocks to be told."""
        if block_count and getattr(request, "kv_cache_report_mode", "incremental") == "full":
            self._pool.emit_cached_block_events(request, block_count, self._block_size, GROUP)

    def removed(self, digests: bytes) -> None:
        """Tells that blocks cannot be hit any more."""
        for start in range(0, len(digests), DIGEST_BYTES):
            told = self._told.pop(digests[start : start + DIGEST_BYTES], None)
            if told is not None:
                self._pool.kv_event_queue.append(
                    BlockRemoved(
                        block_hashes=[maybe_convert_block_hash(told)], medium=self._pool.medium, group_idx=GROUP
                    )
                )

    def cleared(self) -> None:
        """Tells that nothing can be hit any more, or that it is not known what."""
        self._told.clear()
        self._pool.kv_event_queue.append(AllBlocksCleared())

    def _tell(self, request: Request, first: int, end: int) -> None:
        size, hashes, place, extra_keys = self._block_size, request.block_hashes, 0, []
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
                kv_cache_group_id=GROUP,
                extra_keys_list=extra_keys,
            )
        )


def _digest(block_hash: bytes) -> bytes:
    return bytes(block_hash).ljust(DIGEST_BYTES, b"\0")
