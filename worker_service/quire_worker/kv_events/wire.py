"""Events as vLLM 0.24 and later encode them: msgpack maps with a `type`, in an array of time, events and rank.

Only the fields that readers need are sent. vLLM's readers take the defaults of the other fields.
"""

from __future__ import annotations

import msgspec

MEDIUM = "GPU"  # vLLM's name for the memory that passes read, on every kind of device
KIND = "full_attention"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks of one prefix can be hit.

    Attributes:
        block_hashes: one per block; see `block_hash`.
        parent_block_hash: hash of the block before the first of these blocks; None at the start of a prompt.
        token_ids: the tokens of all these blocks.
        block_size: tokens per block.
        lora_id: always None; readers use the name.
        medium: the tier.
        lora_name: the adapter of the prefix.
        extra_keys: for each block, what its hash depends on besides tokens, in vLLM's form: the adapter in each block,
            and the cache salt in the first block; see `published_index.keys_of`.
        group_idx: number of the group among those that are published, so always 0.
        kv_cache_spec_kind: kind of the group's attention.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks can no longer be hit."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No block can be hit."""


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


Event = BlockStored | BlockRemoved | AllBlocksCleared


def block_hash(digest: bytes) -> int:
    """Returns a digest in vLLM's default form for published hashes: the last 64 bits as a number."""
    return int.from_bytes(digest[-8:], "big")
