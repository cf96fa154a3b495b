"""The OpenTelemetry span of a request that ended: its numbers, and parts for queue, prefill and decode."""

from __future__ import annotations

from typing import Final

from quire._serving.tracing import Done

from quire_worker.scheduling.request import Request
from quire_worker.scheduling.trace import Stage

OPERATION: Final = "text_completion"  # A worker gets tokens even for chats, so each operation is a text completion.


def span_of(request: Request, ended_s: float, *, model: str, pool: str) -> Done:
    """Returns the span of a request, with the names of OpenTelemetry's GenAI conventions where they have one."""
    usage, trace, sampling = request.usage, request.trace, request.sampling
    has_begun = request.first_token_s is not None
    finish = [each.finish_reason.value for each in request.samples if each.finish_reason]
    return Done(
        f"{OPERATION} {model}",
        request.arrived_s,
        ended_s,
        {
            "gen_ai.operation.name": OPERATION,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": sampling.max_tokens or None,
            "gen_ai.request.choice.count": len(request.samples) if len(request.samples) > 1 else None,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.finish_reasons": finish,
            "gen_ai.usage.input_tokens": len(request.prompt),
            "gen_ai.usage.output_tokens": usage.output_token_count,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_token_count if has_begun else None,
            "quire.request.id": request.request_id,
            "quire.namespace": request.namespace,
            "quire.adapter": None if request.adapter is None else request.adapter.name,
            "quire.pool": pool,
            "quire.preemptions": usage.preemption_count,
            "quire.blocks.max": trace.block_count_max,
            "quire.allocator.steps": trace.step_count,
            "quire.allocator.step_s": round(trace.step_s, 6),
            "error.type": trace.error,
        },
        _parts_of(request, ended_s),
    )


def _parts_of(request: Request, ended_s: float) -> list[Done]:
    """Returns the spans of queue, prefill and decode. After a preemption a request waits in the queue again."""
    first_s = request.first_token_s
    events = [(at_s, stage.value) for stage, at_s in request.trace.stages]
    events += [] if first_s is None else [(first_s, "first token")]
    parts: list[Done] = []
    name, start_s, has_begun = "queue", request.arrived_s, False
    for at_s, event in [*sorted(events), (ended_s, "ended")]:
        if event == Stage.ADMITTED and name != "queue":
            continue  # Another sample of the same request was admitted before.
        if event == Stage.PREEMPTED and name == "queue":
            continue
        parts.append(_part(name, start_s, at_s, request))
        has_begun = has_begun or event == "first token"
        name, start_s = ("queue" if event == Stage.PREEMPTED else "decode" if has_begun else "prefill"), at_s
    return parts


def _part(name: str, start_s: float, end_s: float, request: Request) -> Done:
    if name == "queue":
        steps = [each for each in request.trace.steps if start_s <= each[0] <= end_s]
        asked = [Done("allocator step", sent_s, min(answered_s, end_s), {}, (), True) for sent_s, answered_s in steps]
        return Done(name, start_s, end_s, {}, asked)
    if name == "prefill":
        computed = len(request.prompt) - request.usage.cached_token_count
        return Done(name, start_s, end_s, {"quire.prefill.tokens": computed})
    return Done(name, start_s, end_s)
