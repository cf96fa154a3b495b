"""Requests that the gateway is answering, as operators see them: without prompt and text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Entry:
    """One request, from its key to its end.

    Attributes:
        request_id: of its caller, or a new one.
        key: name of its key.
        namespace: of its key.
        route: path that was called.
        came_s: when it came, on the scale of `time.monotonic`.
        model: name of the model that answers; empty before it is known.
        workers: addresses of those that were asked, one for each prompt and each retry.
        retry_count: workers that were asked after another one had refused.
        prompt_tokens, cached_tokens, output_tokens: of the prompts that have ended.
        first_token_s: seconds to the first piece; None before it.
        finish: why each choice ended.
        error: code of its error; empty if there is none.
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
        """Counts the tokens that its key pays for."""
        return self.prompt_tokens + self.output_tokens

    def values(self, now_s: float) -> dict[str, Any]:
        """Returns what a log line and a list have of it, beside its id and its error."""
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
