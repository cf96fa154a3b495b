"""The calls of WorkerService that list and cancel requests. Also writes the request log."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, TypeAlias

from grpc import aio
from quire._serving.request_log import RequestLog
from quire._serving.rpc import Authorize, abort
from quire._serving.tracing import OFF, Done, Tracing
from quire._trace_context import carried, trace_id_of
from quire.errors import QuireError, Reason, RequestCancelledError
from quire.protocol.permissions import Permissions
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc as pb_grpc

from quire_worker.calls.generate_messages import FINISH_REASONS
from quire_worker.calls.request_spans import span_of
from quire_worker.engine import Engine
from quire_worker.scheduling.request import Request
from quire_worker.scheduling.waiting import Wait

Context: TypeAlias = "aio.ServicerContext[Any, Any]"
ENDED_MAX: Final = 256  # ended requests whose numbers are remembered
LISTED_MAX: Final = 4_096


class RequestRecords:
    """Records the requests of one engine: their list, and a log line for each request that ends.

    Args:
        engine: the engine; its `on_ended` is set to this object.
        request_log: gets the lines.
        model_name: the model's name in the lines.
        pool: the pool's name in the lines.
        tracing: gets a span of each request.
    """

    def __init__(
        self, engine: Engine, request_log: RequestLog, *, model_name: str, pool: str, tracing: Tracing = OFF
    ) -> None:
        self._engine = engine
        self._log, self._tracing = request_log, tracing
        self._about = {"model": model_name, "pool": pool}
        self._ended: deque[pb.RequestInfo] = deque(maxlen=ENDED_MAX)
        engine.on_ended = self._note_end

    def listed(self, request_id: str, permissions: Permissions, *, with_ended: bool) -> pb.ListRequestsResponse:
        """Returns the requests in the namespaces that the caller may use; with their stages if an id is given."""
        engine = self._engine
        waits = engine.waits()
        found = [info for info in self._ended if with_ended and permissions.may_use(info.namespace)]
        open_requests = sorted(engine.open_requests, key=lambda request: request.number)
        found += [
            self._info(request, waits.get(request), permissions)
            for request in open_requests
            if permissions.may_use(request.namespace) and request_id in ("", request.request_id)
        ]
        if request_id:
            return pb.ListRequestsResponse(requests=[info for info in found if info.request_id == request_id])
        response = pb.ListRequestsResponse(requests=found[:LISTED_MAX], truncated=len(found) > LISTED_MAX)
        for info in response.requests:
            del info.stages[:]
        return response

    def cancel(self, request_id: str, permissions: Permissions) -> int:
        """Cancels the requests with an id that the caller may use. Returns the number of these requests."""
        found = [
            request
            for request in self._engine.open_requests
            if request.request_id == request_id and permissions.may_use(request.namespace) and not request.is_done
        ]
        for request in found:
            self._engine.fail(request, RequestCancelledError("the request was cancelled by CancelRequest"))
        return len(found)

    def refused(self, request: pb.GenerateRequest, error: QuireError) -> None:
        """Logs a request that was refused before it began."""
        reason, now_s = error.reason or error.code.name, self._engine.clock()
        values = {"quire.request.id": request.request_id[:64], "error.type": reason}
        trace_id = self._tracing.record(Done("refused request", now_s, now_s, values), carried(), now_s)
        self._log.ended(request.request_id[:64], lambda: {**self._about, **_trace(trace_id)}, error=reason)

    def close(self) -> None:
        """Writes the log lines of ended requests; from now on each at once."""
        self._log.close()

    def _info(self, request: Request, wait: Wait | None, permissions: Permissions) -> pb.RequestInfo:
        now_s = self._engine.clock()
        is_running = any(sample.sequence_id and not sample.has_ended for sample in request.samples)
        info = _info_of(request, now_s)
        info.state = pb.REQUEST_STATE_RUNNING if is_running or wait is None else pb.REQUEST_STATE_WAITING
        if wait is not None and not is_running:
            info.wait_reason = pb.WaitReason.ValueType(wait.reason)
            info.missing_block_count = wait.missing_block_count
            if wait.behind is not None and permissions.may_use(wait.behind.namespace):
                info.behind_request_id = wait.behind.request_id
        if request.deadline_s < float("inf"):
            info.time_left_s = max(0.0, request.deadline_s - now_s)
        info.block_count = request.block_count
        info.block_count_max = max(info.block_count, info.block_count_max)
        return info

    def _note_end(self, request: Request) -> None:
        info = _info_of(request, self._engine.clock())
        info.state = pb.REQUEST_STATE_ENDED
        info.stages.add(name="ended", at_s=info.age_s)
        self._ended.append(info)
        trace_id = self._traced(request)
        numbers = self._engine.telemetry
        numbers.request_seconds.exemplify(info.age_s, info.request_id, trace_id)
        if info.HasField("first_token_s"):
            numbers.first_token_seconds.exemplify(info.first_token_s, info.request_id, trace_id)
        finish = [sample.finish_reason.value for sample in request.samples if sample.finish_reason is not None]
        about = {**self._about, **_trace(trace_id)}
        self._log.ended(info.request_id, lambda: _line_of(info, finish) | about, error=info.error)

    def _traced(self, request: Request) -> str:
        """Records a request's span. Returns the id of the request's trace."""
        if not self._tracing.is_on:
            return trace_id_of(request.trace.carried)
        now_s = self._engine.clock()
        done = span_of(request, now_s, model=self._about["model"], pool=self._about["pool"])
        return self._tracing.record(done, request.trace.carried, now_s)


def _trace(trace_id: str) -> dict[str, str]:
    return {"trace_id": trace_id} if trace_id else {}


def _line_of(info: pb.RequestInfo, finish: list[str]) -> dict[str, Any]:
    """Returns the values of an ended request's log line."""
    line: dict[str, Any] = {"adapter": info.adapter} if info.adapter else {}
    return line | {
        "namespace": info.namespace,
        "sequences": list(info.sequence_ids),
        "prompt_tokens": info.prompt_token_count,
        "cached_tokens": info.cached_token_count,
        "output_tokens": info.output_token_count,
        "queue_s": round(info.queue_s, 4) if info.HasField("queue_s") else None,
        "first_token_s": round(info.first_token_s, 4) if info.HasField("first_token_s") else None,
        "total_s": round(info.age_s, 4),
        "finish": finish,
        "preemptions": info.preemption_count,
        "blocks_max": info.block_count_max,
    }


def _info_of(request: Request, now_s: float) -> pb.RequestInfo:
    """Returns the fields that running and ended requests have in common."""
    trace, usage, came_s = request.trace, request.usage, request.arrived_s
    info = pb.RequestInfo(
        request_id=request.request_id,
        namespace=request.namespace,
        adapter="" if request.adapter is None else request.adapter.name,
        age_s=now_s - came_s,
        priority=request.priority,
        sample_count=len(request.samples),
        finish_reasons=[FINISH_REASONS[each.finish_reason] for each in request.samples if each.finish_reason],
        prompt_token_count=len(request.prompt),
        cached_token_count=usage.cached_token_count,
        output_token_count=usage.output_token_count,
        preemption_count=usage.preemption_count,
        sequence_ids=trace.sequence_ids,
        block_count_max=trace.block_count_max,
        error=trace.error,
    )
    happened = [("received", came_s), *((stage.value, at_s) for stage, at_s in trace.stages)]
    if request.admitted_s is not None:
        info.queue_s = request.admitted_s - came_s
    if request.first_token_s is not None:
        info.first_token_s = request.first_token_s - came_s
        happened.append(("first token", request.first_token_s))
    for name, at_s in sorted(happened, key=lambda each: each[1]):
        info.stages.add(name=name, at_s=at_s - came_s)
    return info


class RequestCalls(pb_grpc.WorkerServiceServicer):
    """Answers the calls that list and cancel requests."""

    _records: RequestRecords
    _pool: str
    _authorize: Authorize

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        """Returns the open requests, to observers of the pool."""
        permissions: Permissions = self._authorize(context)
        if not permissions.may_observe(self._pool):
            await abort(context, QuireError.of(Reason.POOL_FORBIDDEN, "the certificate does not permit this pool"))
        return self._records.listed(request.request_id, permissions, with_ended=request.with_ended)

    async def CancelRequest(self, request: pb.CancelRequestRequest, context: Context) -> pb.CancelRequestResponse:
        """Cancels the requests with an id."""
        count = self._records.cancel(request.request_id, self._authorize(context))
        return pb.CancelRequestResponse(cancelled_count=count)
