"""Converts between `quire.v1` messages and the values of `quire.types`: pure functions for both flavors."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar, cast

from google.protobuf.message import Message

from quire import types, views
from quire._numbers import shown
from quire._transport.ranges import UINT32, Range, check, check_field
from quire.errors import InvalidArgumentError, Reason
from quire.protocol.features import APPEND_ONLY, FIRST_BLOCK_ID, TELLS_REMOVED
from quire.protocol.limits import PROTOCOL_VERSION, REQUEST_ID_CHARACTERS_MAX
from quire.protocol.outcomes import NULL_BLOCK
from quire.protocol.packing import unpack_uint32
from quire.protocol.steps import cache_drop, concatenated
from quire.v1 import allocator_pb2 as pb
from quire.v1 import server_pb2
from quire.v1 import worker_pb2 as worker_pb

MessageT = TypeVar("MessageT", bound=Message)
_FINISHED = {worker_pb.FINISH_REASON_STOP: "stop", worker_pb.FINISH_REASON_LENGTH: "length"}

# ----------------------------------------------------------------------------------------------------------------------
# Servers


def server_info(message: server_pb2.GetServerInfoResponse) -> types.ServerInfo:
    """Converts a message to a server's description."""
    limits = types.Limits(**values_of(message.limits))
    return types.ServerInfo(**{**values_of(message), "features": tuple(message.features), "limits": limits})


# ----------------------------------------------------------------------------------------------------------------------
# The worker


def adapter_info(message: worker_pb.Adapter) -> types.AdapterInfo:
    """Converts a message to an adapter's description."""
    return types.AdapterInfo(**values_of(message))


def worker_status(message: worker_pb.GetStatusResponse) -> types.WorkerStatus:
    """Converts a message to a worker's status."""
    device = types.DeviceMemory(**values_of(message.memory.device)) if message.memory.HasField("device") else None
    memory = types.PoolMemory(**{**values_of(message.memory), "device": device})
    given = message.sampling_defaults
    defaults = types.SamplingDefaults(**{field.name: value for field, value in given.ListFields()})
    aliases = tuple(message.model_aliases)
    told = {"memory": memory, "sampling_defaults": defaults, "model_aliases": aliases}
    return types.WorkerStatus(**{**values_of(message), **told})


def request_info(message: worker_pb.RequestInfo) -> views.RequestInfo:
    """Converts a message to the description of a worker's request."""
    values = values_of(message)
    for name in ("queue_s", "first_token_s", "time_left_s"):
        values[name] = getattr(message, name) if message.HasField(name) else None
    values.update(
        state=views.RequestState(message.state),
        wait_reason=views.WaitReason(message.wait_reason) if message.wait_reason else None,
        sequence_ids=tuple(message.sequence_ids),
        finish_reasons=tuple(_FINISHED.get(reason, "unknown") for reason in message.finish_reasons),
        stages=tuple(views.RequestStage(stage.name, stage.at_s) for stage in message.stages),
    )
    return views.RequestInfo(**values)


# ----------------------------------------------------------------------------------------------------------------------
# Pools


def pool_spec_message(spec: types.PoolSpec) -> pb.PoolSpec:
    """Converts a pool's specification to a message."""
    check("first_block_id", spec.first_block_id, UINT32, Reason.MALFORMED)
    message = pb.PoolSpec(
        cache_layout=spec.cache_layout,
        model_fingerprint=spec.model_fingerprint,
        eviction_policy=spec.eviction_policy,
        retention=spec.retention,
        features=_features_of(spec),
    )
    for group in spec.groups:
        added = message.groups.add(kind=cast("pb.GroupKind.ValueType", int(group.kind)))
        sizes = {"block_size": group.block_size, "window": group.window}
        fill(added, reason=Reason.MALFORMED, **sizes)
    for quota in spec.quotas:
        limits = {"held_blocks_max": quota.held_blocks_max, "cached_blocks_max": quota.cached_blocks_max}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        fill(message.quotas.add(namespace=quota.namespace), reason=Reason.MALFORMED, **given)
    counts = {
        "block_count": spec.block_count,
        "watermark_block_count": spec.watermark_block_count,
        "chunk_token_count_max": spec.chunk_token_count_max,
        "first_block_id": spec.first_block_id,
        "block_bytes": spec.block_bytes,
    }
    return fill(message, reason=Reason.MALFORMED, **counts)


def _features_of(spec: types.PoolSpec) -> list[str]:
    asked = {APPEND_ONLY: spec.append_only, FIRST_BLOCK_ID: spec.first_block_id > 0, TELLS_REMOVED: spec.tells_removed}
    return [name for name, is_asked in asked.items() if is_asked]


def pool_spec(message: pb.PoolSpec) -> types.PoolSpec:
    """Converts a message to a pool's specification."""
    groups = (types.GroupSpec(types.GroupKind(group.kind), group.block_size, group.window) for group in message.groups)
    quotas = (
        types.Quota(
            quota.namespace,
            quota.held_blocks_max if quota.HasField("held_blocks_max") else None,
            quota.cached_blocks_max if quota.HasField("cached_blocks_max") else None,
        )
        for quota in message.quotas
    )
    values = values_of(message)
    features = values.pop("features")
    values.update(
        groups=tuple(groups),
        quotas=tuple(quotas),
        append_only=APPEND_ONLY in features,
        tells_removed=TELLS_REMOVED in features,
    )
    return types.PoolSpec(**values)


def routed_worker_message(worker: types.RoutedWorker) -> pb.RoutedWorker:
    """Converts what routers may know of a worker to a message."""
    rate = worker.prefill_tokens_per_s
    message = pb.RoutedWorker(adapters=worker.adapters, draining=worker.draining)
    numbers = {"address": worker.address, "model": worker.model, "prefill_tokens_per_s": rate}
    return fill(message, reason=Reason.MALFORMED, **numbers)


def pool_summary(message: pb.PoolSummary) -> views.PoolSummary:
    """Converts a message to a pool's summary."""
    values = values_of(message)
    values.update(
        spec=pool_spec(message.spec),
        session_kind=views.SessionKind(message.session_kind),
        groups=tuple(views.GroupUsage(**values_of(group)) for group in message.groups),
        worker=None,
    )
    if message.HasField("worker"):
        values["worker"] = types.RoutedWorker(**{**values_of(message.worker), "adapters": (*message.worker.adapters,)})
    return views.PoolSummary(**values)


def drop_request(
    pool: str, namespace: str | None, digests: bytes | Iterable[bytes] | None, kept_digest_count: int
) -> pb.DropCacheRequest:
    """Returns the message that drops cached blocks of a pool."""
    check("kept_digest_count", kept_digest_count, UINT32, Reason.MALFORMED)
    return pb.DropCacheRequest(pool=pool, drop=cache_drop(namespace, digests, kept_digest_count))


def pool_usage(message: pb.GetPoolUsageResponse) -> views.PoolUsage:
    """Converts a message to the usage of a pool's memory."""
    usage = message.usage
    values = values_of(usage)
    values.update(
        summary=pool_summary(message.summary),
        namespaces=tuple(views.NamespaceUsage(**values_of(use)) for use in usage.namespaces),
        longest_prefixes=tuple(views.PrefixUsage(**values_of(use)) for use in usage.longest_prefixes),
        most_shared_prefixes=tuple(views.PrefixUsage(**values_of(use)) for use in usage.most_shared_prefixes),
    )
    return views.PoolUsage(**values)


def pool_blocks(pages: Sequence[pb.GetPoolBlocksResponse]) -> views.PoolBlocks:
    """Returns the holders of a pool's blocks from all pages of an answer, with the last page's summary."""
    parts: dict[int, list[pb.SequenceInfo]] = {}  # A long sequence spans several messages.
    for page in pages:
        for info in page.sequences:
            parts.setdefault(info.sequence_id, []).append(info)
    return views.PoolBlocks(
        summary=pool_summary(pages[-1].summary),
        block_states=b"".join(page.block_states for page in pages),
        sequences=tuple(map(_sequence, parts.values())),
    )


def match_request(digests: bytes | Iterable[bytes], namespace: str) -> pb.MatchPrefixRequest:
    """Returns the message that asks which pools have published a prompt's prefix."""
    return pb.MatchPrefixRequest(namespace=namespace, digests=concatenated(digests))


RESERVATION_S: Final = 5.0  # longer than a request takes from the gateway to its worker's scheduler
_RESERVATION_S: Final = Range(0, 60.0)


def route_request(
    model: str,
    digests: bytes | Iterable[bytes],
    prompt_token_count: int,
    *,
    namespace: str,
    adapter: str,
    reservation_s: float,
) -> pb.RouteRequest:
    """Returns the message that asks for a prompt's worker."""
    request = pb.RouteRequest(model=model, digests=concatenated(digests), namespace=namespace, adapter=adapter)
    check("reservation_s", reservation_s, _RESERVATION_S)
    numbers = {"prompt_token_count": prompt_token_count, "reservation_ms": round(reservation_s * 1e3)}
    return fill(request, reason=Reason.MALFORMED, **numbers)


def prefix_matches(message: pb.MatchPrefixResponse) -> tuple[views.PrefixMatch, ...]:
    """Returns the matching pools, best first."""
    return tuple(views.PrefixMatch(**values_of(match)) for match in message.matches)


def watch_request(pool: str, session_id: bytes, cursor: int) -> pb.WatchEventsRequest:
    """Returns the message that starts a watch."""
    return fill(pb.WatchEventsRequest(pool=pool, session_id=session_id), reason=Reason.MALFORMED, cursor=cursor)


def _sequence(parts: Sequence[pb.SequenceInfo]) -> views.SequenceInfo:
    """Joins the parts of one sequence, in order. Counts are the last part's."""
    info = parts[-1]
    pieces = zip(*(part.tables for part in parts), strict=True)  # the tables of all parts, group by group
    return views.SequenceInfo(
        sequence_id=info.sequence_id,
        namespace=info.namespace,
        token_count=info.token_count,
        committed_token_count=info.committed_token_count,
        tables=_tables(pb.BlockTable(blocks=b"".join(piece.blocks for piece in group)) for group in pieces),
    )


def _tables(tables: Iterable[pb.BlockTable]) -> tuple[types.BlockTable, ...]:
    return tuple(
        tuple(None if block == NULL_BLOCK else block for block in unpack_uint32(table.blocks)) for table in tables
    )


# ----------------------------------------------------------------------------------------------------------------------
# Unary sessions


def open_request(pool: str, spec: types.PoolSpec, request_id: str | None) -> pb.OpenSessionRequest:
    """Returns the message that opens a unary session."""
    request = operation(pb.OpenSessionRequest(version=PROTOCOL_VERSION, spec=pool_spec_message(spec)), request_id)
    return fill(request, request.request_id, reason=Reason.MALFORMED, pool=pool)


# ----------------------------------------------------------------------------------------------------------------------
# Filling and reading messages


def new_request_id() -> str:
    """Returns a random id for one call."""
    return uuid.uuid4().hex


def checked_id(request_id: str | None) -> str:
    """Returns the caller's request id, or a new one. A request id must fit into logs and headers.

    Raises:
        InvalidArgumentError: MALFORMED, the id is too long or contains forbidden characters.
    """
    if request_id is None or request_id == "":
        return new_request_id()
    is_plain = request_id.isascii() and request_id.isprintable() and " " not in request_id
    if len(request_id) > REQUEST_ID_CHARACTERS_MAX or not is_plain:
        raise InvalidArgumentError(
            f"request_id {request_id[:80]!r} must have 1 to {REQUEST_ID_CHARACTERS_MAX} printable ASCII characters "
            "and no space, for example letters, digits, - and _",
            Reason.MALFORMED,
        )
    return request_id


def fill_tokens(message: Any, given: str | Sequence[int], name: str, request_id: str) -> None:
    """Puts text or tokens into a message that accepts either.

    Raises:
        TypeError: the value is neither.
        InvalidArgumentError: BAD_PARAMETER, a number does not fit the message.
    """
    if isinstance(given, str):
        fill(message, request_id, text=given)
    elif isinstance(given, (bytes, bytearray)):
        raise TypeError(f"{name} must be text or token ids, not bytes")
    else:
        message.tokens.SetInParent()
        extend(message.tokens.ids, name, given, request_id)


def operation(message: MessageT, request_id: str | None, **values: int) -> MessageT:
    """Fills an operation's fields: its request id, which is new unless the caller gives one, and its numbers."""
    request_id = checked_id(request_id)
    return fill(message, request_id, reason=Reason.MALFORMED, request_id=request_id, **values)


def fill(
    _message: MessageT, _error_id: str | None = None, /, *, reason: Reason = Reason.BAD_PARAMETER, **values: Any
) -> MessageT:
    """Sets fields of a message, and returns it.

    Raises:
        InvalidArgumentError: a value does not fit its field. The error has the field's name and the request's id.
        TypeError: a value has the wrong type.
    """
    for name, value in values.items():
        check_field(_message, name, value, reason, _error_id)
        try:
            setattr(_message, name, value)
        except ValueError as error:  # protobuf's error for a number outside the field's range
            raise InvalidArgumentError(_what_is_wrong(name, error), reason, _error_id, field=name) from None
        except TypeError as error:
            raise _wrong_type(name, value, error) from None
    return _message


def _what_is_wrong(name: str, error: ValueError) -> str:
    is_half = isinstance(error, UnicodeEncodeError)
    return f"{name} is not valid text: it contains half of a surrogate pair" if is_half else f"{name}: {error}"


def _wrong_type(name: str, value: object, error: TypeError) -> TypeError:
    return TypeError(f"{name} has the wrong type: {shown(value)} ({error})")


def values_of(message: Message) -> dict[str, Any]:
    """Returns every field of a message by name, to create a value with the same attributes."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def with_lists(_message: MessageT, /, **lists: Iterable[int]) -> MessageT:
    """Adds values to repeated fields of a message, and returns it. Raises the same errors as `fill`."""
    for name, values in lists.items():
        extend(getattr(_message, name), name, values, None)
    return _message


def extend(
    field: Any, name: str, values: Iterable[Any], request_id: str | None, reason: Reason = Reason.BAD_PARAMETER
) -> None:
    """Adds values to a repeated field. Raises the same errors as `fill`."""
    try:
        field.extend(values)
    except ValueError as error:
        for value in [] if isinstance(error, UnicodeEncodeError) else values:
            check(f"{name}: each value", value, UINT32, reason, request_id, field=name)
        raise InvalidArgumentError(_what_is_wrong(name, error), reason, request_id, field=name) from None
    except TypeError as error:
        raise _wrong_type(name, values, error) from None
