"""Translates between `quire.v1` messages and the core's values, and checks all that comes in."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from typing import Final, cast

from quire.protocol.features import APPEND_ONLY, FEATURES, FIRST_BLOCK_ID, TELLS_REMOVED
from quire.protocol.limits import (
    HEARTBEAT_S,
    MESSAGE_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    PRIORITY_MAX,
    PROTOCOL_VERSION,
    REQUEST_ID_CHARACTERS_MAX,
    SILENCE_S,
    STOPS_MAX,
)
from quire.protocol.packing import pack_uint32
from quire.v1 import allocator_pb2 as pb
from quire.v1 import server_pb2

from quire_allocator import limits
from quire_allocator.core.drop import CacheDrop
from quire_allocator.core.eviction.policies import POLICIES
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import (
    DIGEST_BYTES,
    RETENTIONS,
    GroupKind,
    GroupSpec,
    PoolSpec,
    Quota,
)

QUOTED_CHARACTERS_MAX: Final = 64  # most characters of a caller's name that a message quotes
_NAME = re.compile(rf"[A-Za-z0-9._/-]{{1,{limits.NAME_CHARACTERS_MAX}}}")

KINDS: Final = {cast("pb.GroupKind.ValueType", kind.value): kind for kind in GroupKind}
WIRE_KINDS: Final = {kind: number for number, kind in KINDS.items()}

LIMITS = server_pb2.Limits(
    message_bytes_max=MESSAGE_BYTES_MAX,
    step_bytes_max=limits.STEP_BYTES_MAX,
    operations_per_step_max=limits.OPERATIONS_PER_STEP_MAX,
    sequences_max=limits.SEQUENCES_MAX,
    window_max=limits.WINDOW_MAX,
    heartbeat_ms=int(HEARTBEAT_S * 1000),
    silence_ms=int(SILENCE_S * 1000),
    stops_max=STOPS_MAX,
)


def require(
    condition: bool, message: str | Callable[[], str], reason: str = "MALFORMED", field: str | None = None
) -> None:
    """Raises `Refusal` with this message, reason and field unless the condition holds."""
    if not condition:
        raise Refusal(reason, message if isinstance(message, str) else message(), field=field)


def in_range(field: str, value: int, least: int, most: int, where: str = "") -> None:
    """Refuses a number outside of a range as MALFORMED."""
    if not least <= value <= most:
        name = field.rpartition(" ")[2]
        raise Refusal("MALFORMED", f"{field}{where} must be from {least} to {most:,}, not {value:,}", field=name)


def _quoted(name: str) -> str:
    """Returns a name quoted for a message. For a string that cannot be a name, gives only its length, because the
    string may be private text."""
    is_one = name.isprintable() and " " not in name and len(name) <= QUOTED_CHARACTERS_MAX
    return repr(name) if is_one else f"a text of {len(name):,} characters"


def _known(field: str, name: str, known: Sequence[str]) -> None:
    """Refuses a name that is neither empty nor known as MALFORMED."""
    if name and name not in known:
        text = f"{field} {_quoted(name)} is not known: use one of {', '.join(known)}"
        raise Refusal("MALFORMED", text, field=field)


def version(number: int) -> None:
    """Refuses an owner of another protocol version as VERSION."""
    require(
        number == PROTOCOL_VERSION,
        f"version {number} is not supported: this allocator supports version {PROTOCOL_VERSION}; update the "
        f"{'owner' if number < PROTOCOL_VERSION else 'allocator'}",
        "VERSION",
        "version",
    )


def priority(number: int, where: str, field: str | None = None) -> None:
    """Refuses a priority that is not on the scale of requests as MALFORMED."""
    if abs(number) > PRIORITY_MAX:
        text = f"{where} must be from {-PRIORITY_MAX} to {PRIORITY_MAX}, not {number}"
        raise Refusal("MALFORMED", text, field=field)


def features(names: Sequence[str]) -> frozenset[str]:
    """Returns the features that an owner relies on.

    Raises:
        Refusal: VERSION if one is not known; MALFORMED if they are too many.
    """
    require(
        len(names) <= limits.FEATURES_MAX,
        f"features must have at most {limits.FEATURES_MAX} names, not {len(names):,}",
        field="features",
    )
    asked = frozenset(names)
    unknown = sorted(asked.difference(FEATURES))
    require(
        not unknown,
        # `_quoted` bounds the message: an owner may send a name of any length.
        lambda: f"feature {_quoted(unknown[0])} is not known: this allocator knows {', '.join(FEATURES)}; update it",
        "VERSION",
        "features",
    )
    return asked


def pool_name(name: str) -> str:
    """Returns a pool's name, or refuses it as MALFORMED."""
    if _NAME.fullmatch(name) is None:
        text = f"pool must have 1 to {limits.NAME_CHARACTERS_MAX} characters of [A-Za-z0-9._/-]"
        raise Refusal("MALFORMED", f"{text}, not {_quoted(name)}", field="pool")
    return name


def namespace(name: str) -> str:
    """Returns a namespace, or refuses it as MALFORMED."""
    size = len(name.encode())
    if size > NAMESPACE_BYTES_MAX:
        text = f"namespace must have at most {NAMESPACE_BYTES_MAX} bytes of UTF-8, not {size:,}"
        raise Refusal("MALFORMED", text, field="namespace")
    return name


def request_id(text: str) -> str:
    """Returns a request id, or refuses it as MALFORMED."""
    if not 0 < len(text) <= REQUEST_ID_CHARACTERS_MAX:
        message = f"request_id must have 1 to {REQUEST_ID_CHARACTERS_MAX} characters, not {len(text):,}"
        raise Refusal("MALFORMED", message, field="request_id")
    return text


def digests(data: bytes) -> bytes:
    """Returns concatenated digests, or refuses them as MALFORMED."""
    if len(data) % DIGEST_BYTES:
        text = f"the length of digests must be a multiple of {DIGEST_BYTES} bytes, not {len(data):,}"
        raise Refusal("MALFORMED", text, field="digests")
    return data


def cache_drop(drop: pb.CacheDrop) -> CacheDrop:
    """Returns the drop of a request, or refuses it as MALFORMED."""
    has_namespace = drop.HasField("namespace")
    kept = drop.kept_digest_count
    require(has_namespace or not drop.digests, "drop: digests need the namespace that they belong to")
    count = len(digests(drop.digests)) // DIGEST_BYTES
    require(
        kept <= count, lambda: f"drop: kept_digest_count must be at most {count:,}, the number of digests, not {kept:,}"
    )
    return CacheDrop(namespace(drop.namespace) if has_namespace else None, drop.digests, kept)


def cache_drop_message(drop: CacheDrop) -> pb.CacheDrop:
    """Returns the message of a drop."""
    return pb.CacheDrop(namespace=drop.namespace, digests=drop.digests, kept_digest_count=drop.kept_digest_count)


def pool_spec(spec: pb.PoolSpec) -> PoolSpec:
    """Returns a pool's specification, checked.

    Raises:
        Refusal: VERSION for a feature that this allocator does not know; MALFORMED for a number out of range; LAYOUT
            for groups that it cannot manage.
    """
    asked = features(spec.features)
    in_range("block_count", spec.block_count, 1, limits.BLOCKS_MAX)
    in_range("number of groups", len(spec.groups), 1, limits.GROUPS_MAX)
    in_range("bytes of cache_layout", len(spec.cache_layout.encode()), 0, limits.LAYOUT_BYTES_MAX)
    in_range("bytes of model_fingerprint", len(spec.model_fingerprint), 0, limits.FINGERPRINT_BYTES_MAX)
    in_range("watermark_block_count", spec.watermark_block_count, 0, spec.block_count)
    _known("eviction_policy", spec.eviction_policy, sorted(POLICIES))
    _known("retention", spec.retention, RETENTIONS)
    in_range("chunk_token_count_max", spec.chunk_token_count_max, 0, limits.CHUNK_TOKENS_MAX)
    require(
        spec.first_block_id == 0 or FIRST_BLOCK_ID in asked,
        f"first_block_id must be left out without the feature {FIRST_BLOCK_ID}, not {spec.first_block_id}",
        field="first_block_id",
    )
    in_range("first_block_id", spec.first_block_id, 0, limits.FIRST_BLOCK_MAX)
    in_range("block_bytes", spec.block_bytes, 0, limits.BLOCK_BYTES_MAX)
    groups = tuple(map(_group_spec, spec.groups))
    smallest = min(group.block_size for group in groups)
    odd = [group.block_size for group in groups if group.block_size % smallest]
    require(
        not odd, lambda: f"every block_size must be a multiple of the smallest, {smallest}; {odd[0]} is not", "LAYOUT"
    )
    require(
        APPEND_ONLY not in asked or all(group.kind is not GroupKind.STATE for group in groups),
        f"with the feature {APPEND_ONLY} no group may have the kind STATE, because each token overwrites a state",
        "LAYOUT",
    )
    return PoolSpec(
        spec.block_count,
        groups,
        spec.cache_layout,
        spec.model_fingerprint,
        spec.watermark_block_count,
        _quotas(spec.quotas),
        spec.eviction_policy,
        spec.retention,
        spec.chunk_token_count_max,
        APPEND_ONLY in asked,
        spec.first_block_id,
        TELLS_REMOVED in asked,
        spec.block_bytes,
    )


def _group_spec(group: pb.GroupSpec) -> GroupSpec:
    kind = KINDS.get(group.kind)
    if kind is None:
        known = ", ".join(f"{number} ({each.name})" for number, each in KINDS.items())
        raise Refusal("MALFORMED", f"group kind {group.kind} is not known: use one of {known}", field="kind")
    in_range("block_size", group.block_size, 1, limits.BLOCK_SIZE_MAX)
    if kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL):
        in_range("window", group.window, 1, limits.WINDOW_TOKENS_MAX, f" of a {kind.name} group")
    else:
        require(group.window == 0, f"window must be 0 for a {kind.name} group, not {group.window:,}", field="window")
    return GroupSpec(kind, group.block_size, group.window)


def _quotas(quotas: Sequence[pb.Quota]) -> tuple[Quota, ...]:
    in_range("number of quotas", len(quotas), 0, limits.QUOTAS_MAX)
    names = [namespace(quota.namespace) for quota in quotas]
    seen = set[str]()
    for name in names:
        require(name not in seen, f"namespace {name!r} has two quotas: give it one", field="quotas")
        seen.add(name)
    return tuple(
        Quota(
            quota.namespace,
            quota.held_blocks_max if quota.HasField("held_blocks_max") else None,
            quota.cached_blocks_max if quota.HasField("cached_blocks_max") else None,
        )
        for quota in quotas
    )


def pool_spec_message(spec: PoolSpec) -> pb.PoolSpec:
    """Returns the message of a pool's specification."""
    return pb.PoolSpec(
        block_count=spec.block_count,
        groups=[pb.GroupSpec(kind=WIRE_KINDS[g.kind], block_size=g.block_size, window=g.window) for g in spec.groups],
        cache_layout=spec.cache_layout,
        model_fingerprint=spec.model_fingerprint,
        watermark_block_count=spec.watermark_block_count,
        quotas=[
            pb.Quota(
                namespace=quota.namespace,
                held_blocks_max=quota.held_blocks_max,
                cached_blocks_max=quota.cached_blocks_max,
            )
            for quota in spec.quotas
        ],
        eviction_policy=spec.eviction_policy,
        retention=spec.retention,
        chunk_token_count_max=spec.chunk_token_count_max,
        features=_features_of(spec),
        first_block_id=spec.first_block_id,
        block_bytes=spec.block_bytes,
    )


def _features_of(spec: PoolSpec) -> list[str]:
    asked = {APPEND_ONLY: spec.append_only, FIRST_BLOCK_ID: spec.first_block_id > 0, TELLS_REMOVED: spec.tells_removed}
    return [name for name, is_asked in asked.items() if is_asked]


def block_table(blocks: array[int]) -> pb.BlockTable:
    """Returns the message of a table: its block ids as uint32 little-endian."""
    return pb.BlockTable(blocks=pack_uint32(blocks))
