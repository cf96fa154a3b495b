"""Between `quire.v1` messages and the core's values: validation on the way in, struct of arrays on the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from quire.hashing import DIGEST_BYTES, split_digests
from quire.limits import MESSAGE_BYTES_MAX, NAMESPACE_BYTES_MAX, REQUEST_ID_CHARACTERS_MAX
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.directory import Refusal
from quire_allocator.core.pool import GroupKind, GroupSpec, PoolSpec

_NAME = re.compile(rf"[A-Za-z0-9._/-]{{1,{limits.NAME_CHARACTERS_MAX}}}")

LIMITS = pb.Limits(
    message_bytes_max=MESSAGE_BYTES_MAX,
    step_bytes_max=limits.STEP_BYTES_MAX,
    operations_per_step_max=limits.OPERATIONS_PER_STEP_MAX,
    sequences_max=limits.SEQUENCES_MAX,
    window_max=limits.WINDOW_MAX,
)


def require(condition: bool, message: str | Callable[[], str], reason: str = "MALFORMED") -> None:
    """Raises Refusal unless the condition holds."""
    if not condition:
        raise Refusal(reason, message if isinstance(message, str) else message())


def pool_name(name: str) -> str:
    """A pool's name, checked."""
    require(_NAME.fullmatch(name) is not None, "pool must be 1 to 128 characters of [A-Za-z0-9._/-]")
    return name


def namespace(name: str) -> str:
    """A namespace, checked."""
    require(len(name.encode()) <= NAMESPACE_BYTES_MAX, "namespace must be at most 128 bytes")
    return name


def request_id(text: str) -> str:
    """A request id, checked."""
    require(0 < len(text) <= REQUEST_ID_CHARACTERS_MAX, "request_id must be 1 to 64 characters")
    return text


def digests(data: bytes) -> list[bytes]:
    """Concatenated digests, checked and split."""
    require(len(data) % DIGEST_BYTES == 0, f"digests must be a multiple of {DIGEST_BYTES} bytes")
    return split_digests(data)


def pool_spec(spec: pb.PoolSpec) -> PoolSpec:
    """A pool's specification.

    Raises:
        Refusal: MALFORMED, a number out of range; LAYOUT, groups that this allocator cannot manage.
    """
    require(1 <= spec.block_count <= limits.BLOCKS_MAX, f"block_count must be 1 to {limits.BLOCKS_MAX}")
    require(1 <= len(spec.groups) <= limits.GROUPS_MAX, f"a pool has 1 to {limits.GROUPS_MAX} groups")
    require(len(spec.cache_layout.encode()) <= limits.LAYOUT_BYTES_MAX, "cache_layout is too long")
    require(len(spec.model_fingerprint) <= limits.FINGERPRINT_BYTES_MAX, "model_fingerprint is too long")
    for group in spec.groups:
        require(1 <= group.block_size <= limits.BLOCK_SIZE_MAX, f"block_size must be 1 to {limits.BLOCK_SIZE_MAX}")
        require(
            group.kind == pb.GROUP_KIND_FULL_ATTENTION,
            lambda group=group: f"group kind {group.kind} is not managed; FULL_ATTENTION is",  # type: ignore[misc]
            "LAYOUT",
        )
    sizes = {group.block_size for group in spec.groups}
    require(len(sizes) == 1, "groups of different block sizes are not managed", "LAYOUT")
    groups = tuple(GroupSpec(GroupKind.FULL_ATTENTION, group.block_size) for group in spec.groups)
    return PoolSpec(spec.block_count, groups, spec.cache_layout, spec.model_fingerprint)


def pool_spec_message(spec: PoolSpec) -> pb.PoolSpec:
    """The same, on the way out."""
    return pb.PoolSpec(
        block_count=spec.block_count,
        groups=[pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=g.block_size) for g in spec.groups],
        cache_layout=spec.cache_layout,
        model_fingerprint=spec.model_fingerprint,
    )


def block_table(blocks: Sequence[int]) -> pb.BlockTable:
    """Block ids as uint32 little-endian."""
    return pb.BlockTable(blocks=pack_blocks(blocks))


def pack_blocks(blocks: Iterable[int]) -> bytes:
    """Block ids as uint32 little-endian bytes."""
    return b"".join(block.to_bytes(4, "little") for block in blocks)


def omit_zeros(values: list[int]) -> list[int]:
    """An array of zeros is sent empty."""
    return values if any(values) else []
