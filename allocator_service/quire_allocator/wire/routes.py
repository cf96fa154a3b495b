"""Translates the messages of routing: the worker of a pool, a prompt to route, its route, and admissions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from quire.protocol.packing import unpack_uint32
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.spec import Result
from quire_allocator.routing.router import Prompt, PromptResult, RoutedTo, Worker
from quire_allocator.wire import translate
from quire_allocator.wire.step_columns import StepColumns
from quire_allocator.wire.translate import in_range


def worker(message: pb.RoutedWorker) -> Worker:
    """Returns what an owner says of its worker, or refuses it as MALFORMED."""
    for field, text in (("address", message.address), ("model", message.model)):
        in_range(f"bytes of {field}", len(text.encode()), 1, limits.ADDRESS_BYTES_MAX)
    in_range("number of adapters", len(message.adapters), 0, limits.ADAPTERS_MAX)
    for name in message.adapters:
        in_range("bytes of adapters", len(name.encode()), 1, limits.ADDRESS_BYTES_MAX)
    in_range("prefill_tokens_per_s", message.prefill_tokens_per_s, 0, limits.PREFILL_RATE_MAX)
    return Worker(
        message.address, message.model, frozenset(message.adapters), message.prefill_tokens_per_s, message.draining
    )


def worker_of(message: pb.Attach | pb.OpenSessionRequest | pb.Heartbeat) -> Worker | None:
    """Returns an owner's description of its worker; None if it gives none.

    Raises:
        Refusal: MALFORMED.
    """
    return worker(message.worker) if message.HasField("worker") else None


def prompt(request: pb.RouteRequest, caller: object) -> Prompt:
    """Returns the prompt of a request.

    Raises:
        Refusal: MALFORMED.
    """
    in_range("prompt_token_count", request.prompt_token_count, 1, limits.PROMPT_TOKENS_MAX)
    in_range("number of excluded_pools", len(request.excluded_pools), 0, limits.EXCLUDED_POOLS_MAX)
    in_range("reservation_ms", request.reservation_ms, 0, limits.RESERVATION_MS_MAX)
    return Prompt(
        translate.namespace(request.namespace),
        translate.digests(request.digests),
        request.prompt_token_count,
        request.model,
        request.adapter,
        frozenset(request.excluded_pools),
        request.reservation_ms / 1_000,
        caller,
    )


def response(route: RoutedTo) -> pb.RouteResponse:
    """Returns the message of a route."""
    return pb.RouteResponse(
        pool=route.pool,
        address=route.address,
        hit_token_count=route.candidate.hit_token_count,
        promised_token_count=route.candidate.promised_token_count,
        uncached_token_count=route.candidate.uncached_token_count,
        backlog_token_count=route.candidate.backlog_token_count,
        reserved=route.is_reserved,
    )


def admissions(columns: StepColumns, reply: packed.StepReply, last_sequence_id: int) -> Iterator[PromptResult]:
    """Yields the new sequences that an applied step asked for, and what became of them. Preempted requests that return
    are left out: they were admitted before.

    Args:
        columns: the step.
        reply: its reply.
        last_sequence_id: the highest id before the step.
    """
    matched = unpack_uint32(reply.matched_token_counts) or repeat(0)
    results = reply.grow_results or repeat(pb.RESULT_OK)
    rows = zip(
        columns.grow_sequences,
        columns.grow_digests or repeat(b""),
        columns.grow_namespaces or repeat(""),
        columns.returns or repeat(0),
        matched,
        results,
        strict=False,
    )
    for sequence, digests, namespace, is_return, token_count, result in rows:
        if sequence > last_sequence_id and not is_return and sequence not in columns.children:
            yield PromptResult(namespace, digests, token_count, Result(result))
