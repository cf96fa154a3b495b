"""Converts between WorkerService's messages about branches and the values of `quire.types`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire import sampling, types, views
from quire._transport import ranges
from quire._transport.generating import fill_cache, generate_request
from quire._transport.messages import fill, fill_tokens, operation, values_of
from quire.v1 import worker_pb2 as pb

_TTL_S = ranges.Range(0.1, 3600.0)  # same as the worker's bounds; the worker checks `ttl_s`, too


def prefill_request(
    prompt: str | Sequence[int],
    namespace: str,
    ttl_s: float,
    request_id: str | None,
    cache: sampling.CachePolicy | None = None,
) -> pb.PrefillRequest:
    """Returns the message that creates a branch.

    Raises:
        TypeError: a value has the wrong type.
        InvalidArgumentError: BAD_PARAMETER, `ttl_s` is out of range, or a number does not fit the message.
    """
    request = operation(pb.PrefillRequest(), request_id)
    ranges.check("ttl_s", ttl_s, _TTL_S, request_id=request.request_id)
    fill(request, request.request_id, namespace=namespace, ttl_ms=round(ttl_s * 1e3))
    if cache is not None:
        fill_cache(request.cache, cache, request.request_id)
    fill_tokens(request, prompt, "prompt", request.request_id)
    return request


def fork_request(branch_id: bytes, count: int) -> pb.ForkBranchRequest:
    """Returns the message that forks a branch."""
    request = operation(pb.ForkBranchRequest(branch_id=branch_id), None)
    return fill(request, request.request_id, count=count)


def extend_request(branch_id: bytes, continuation: str | Sequence[int]) -> pb.ExtendBranchRequest:
    """Returns the message that adds tokens to a branch."""
    request = operation(pb.ExtendBranchRequest(branch_id=branch_id), None)
    fill_tokens(request, continuation, "continuation", request.request_id)
    return request


def score_request(branch_id: bytes, candidates: Iterable[str | Sequence[int]]) -> pb.ScoreBranchRequest:
    """Returns the message that scores candidates.

    Raises:
        TypeError: `candidates` is a single text, or a value has the wrong type.
    """
    if isinstance(candidates, (str, bytes)):
        raise TypeError("candidates must be a list of texts or of lists of token ids, not one text")
    request = operation(pb.ScoreBranchRequest(branch_id=branch_id), None)
    for candidate in candidates:
        fill_tokens(request.candidates.add(), candidate, "candidate", request.request_id)
    return request


def continue_request(
    branch_id: bytes,
    params: sampling.SamplingParams | None,
    options: sampling.SamplingOptions,
    *,
    request_id: str | None,
    interval_s: float = 0.0,
    priority: int = 0,
) -> pb.GenerateRequest:
    """Returns the message that continues a branch. Raises the same errors as `generate_request`."""
    request = generate_request(
        (), params, options,
        namespace="", adapter="", request_id=request_id, priority=priority, interval_s=interval_s,
    )  # fmt: skip
    request.branch_id = branch_id
    return request


def scores(message: pb.ScoreBranchResponse) -> tuple[types.Score, ...]:
    """Returns each candidate's score."""
    return tuple(types.Score(tuple(each.token_ids), tuple(each.logprobs)) for each in message.scores)


def branch_infos(message: pb.ListBranchesResponse) -> tuple[views.BranchInfo, ...]:
    """Returns the listed branches."""
    return tuple(views.BranchInfo(**values_of(each)) for each in message.branches)
