"""Requests that the gateway is answering, as operators see them: without their texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from quire._serving.tracing import Attributes

_OPERATIONS: Final = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
}  # path -> operation, as OpenTelemetry's GenAI conventions name it


@dataclass(slots=True, eq=False)
class Entry:
    """One request, from the check of its key until its end.

    Attributes:
        request_id: the caller's id, or a new one.
        key: the name of its key.
        namespace: the namespace of its key.
        route: the path that was called.
        came_s: when it came, in seconds of `time.monotonic`.
        model: name of the model that answers; empty before it is known.
        workers: addresses of the workers that were asked, one for each prompt and each retry.
        retry_count: number of further workers that were asked after a refusal.
        prompt_tokens, cached_tokens, output_tokens: sums over the prompts that have ended.
        first_token_s: seconds until the first piece; None before it.
        finish: the finish reason of each choice.
        error: the code of its error; empty if there is none.
    """

    request_id: str
    key: str
    namespace: str
    route: str
    came_s: float
    model: str = ""
    workers: list[str] = field(default_factory=list)
    retry_count: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    finish: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def token_count(self) -> int:
        """Returns the number of tokens that count against the limit of its key."""
        return self.prompt_tokens + self.output_tokens

    def values(self, now_s: float) -> dict[str, Any]:
        """Returns the values for a log line and for the list of requests, except id and error."""
        return {
            "key": self.key,
            "namespace": self.namespace,
            "route": self.route,
            "model": self.model,
            "workers": self.workers[-8:],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 4),
            "total_s": round(now_s - self.came_s, 4),
            "finish": self.finish[:128],
            "retries": self.retry_count,
        }

    def span_attributes(self, status: int) -> Attributes:
        """Returns the attributes of its span, with the names of OpenTelemetry's conventions where they have one."""
        has_tokens = bool(self.prompt_tokens or self.output_tokens)
        return {
            "http.request.method": "POST",
            "http.response.status_code": status or None,  # The status is 0 if the caller left before an answer began.
            "gen_ai.operation.name": _OPERATIONS.get(self.route),
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self.model,
            "gen_ai.response.id": self.request_id,
            "gen_ai.response.finish_reasons": self.finish[:128],
            "gen_ai.response.time_to_first_chunk": self.first_token_s,
            "gen_ai.usage.input_tokens": self.prompt_tokens if has_tokens else None,
            "gen_ai.usage.output_tokens": self.output_tokens if has_tokens else None,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens if has_tokens else None,
            "quire.request.id": self.request_id,
            "quire.namespace": self.namespace,
            "quire.key": self.key,
            "quire.retries": self.retry_count,
            "error.type": self.error,
        }
