"""The form of responses: whole responses, and the events of streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from quire_gateway import probabilities
from quire_gateway.calls.deltas import CallDelta, Delta
from quire_gateway.failures import RATE, ApiError
from quire_gateway.probabilities import Spelled, Told
from quire_gateway.replies import Answer, Beside, Form, Taken
from quire_gateway.responses.items import new_id

_LENGTH: Final = "length"
_TEXT_EVENTS: Final = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class Ended(NamedTuple):
    """A response that is complete, or was cut at its limit of tokens.

    Attributes:
        response: the response as its caller gets it.
        tokens: the tokens of its prompt and its answer.
        prompt_token_count: the number of tokens that belong to the prompt.
        taken: its usage.
    """

    response: dict[str, Any]
    tokens: Sequence[int]
    prompt_token_count: int
    taken: Taken


class _Item:
    """An item of the output that is being written."""

    def __init__(self, kind: str, index: int, call: CallDelta | None) -> None:
        self.kind, self.index = kind, index
        self.identity = new_id(kind)
        self.text = ""
        self.logprobs: list[Any] = []
        self.call = call

    def as_json(self, status: str, *, has_content: bool = True) -> dict[str, Any]:
        """Returns the item as JSON, with the text so far."""
        head: dict[str, Any] = {"id": self.identity, "type": self.kind, "status": status}
        if self.call is not None:
            return {**head, "call_id": self.call.call_id, "name": self.call.function, "arguments": self.text}
        content = [self.part()] if has_content else []
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        """Returns the only part of the item."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class ResponseForm(Form):
    """The form of /v1/responses. Each response has its own object.

    Args:
        head: the first state of the response.
        on_end: called with a response that has ended, before its caller gets it. The function may change `response`.
    """

    def __init__(self, head: dict[str, Any], on_end: Callable[[Ended], None]) -> None:
        self._head, self._on_end = head, on_end
        self._event_count = 0
        self._output: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._reason: str | None = None
        self._prompt: Sequence[int] = ()
        self._tokens: list[int] = []
        self._logprobs: list[Any] = []  # logprobs that are not in a message yet
        self._is_whole = False  # whether the response is sent as a whole, without events

    def logprobs(self, tokens: Sequence[Told], spelled: Spelled, offsets: Sequence[int]) -> Mapping[str, Any]:
        return probabilities.of_chat(tokens, spelled)

    def whole(self, answers: Sequence[Answer], taken: Taken) -> bytes:
        (answer,) = answers
        self._is_whole = True
        self._prompt = answer.beside.prompt_token_ids or ()
        calls = tuple(
            CallDelta(number, call.arguments, call.call_id, call.function) for number, call in enumerate(answer.calls)
        )
        self.piece(0, Delta(answer.text, answer.reasoning or "", calls), answer.finish_reason, answer.beside)
        self._end()
        return orjson.dumps(self._ended(taken))

    def opening(self, index: int, beside: Beside) -> bytes:
        self._prompt = beside.prompt_token_ids or ()
        return self._event("response.created", response=self._head) + self._event(
            "response.in_progress", response=self._head
        )

    def piece(self, index: int, delta: Delta, finish_reason: str | None, beside: Beside) -> bytes:
        self._tokens += beside.token_ids or ()
        self._reason = finish_reason or self._reason
        if beside.logprobs is not None:
            self._logprobs += beside.logprobs["content"]
        data = b""
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if text:
                data += self._write(kind, text)
        for call in delta.calls:
            data += self._write_call(call)
        return data

    def ending(self, taken: Taken) -> bytes:
        data = self._end()
        response = self._ended(taken)
        return data + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        data = b"" if self._event_count else self.opening(0, Beside())
        return data + self._event("response.failed", response=failed(self._head, error))

    def _write(self, kind: str, text: str) -> bytes:
        data = b""
        if self._item is None or self._item.kind != kind:
            data = self._close() + self._open(_Item(kind, len(self._output), None))
        assert self._item is not None
        self._item.text += text
        where = self._where(has_content=True)
        more = {"logprobs": self._take_logprobs(self._item)} if kind == "message" else {}
        return data + self._event(f"{_TEXT_EVENTS[kind]}.delta", **where, delta=text, **more)

    def _take_logprobs(self, message: _Item) -> list[Any]:
        """Adds the logprobs since the last piece to a message, and returns them."""
        taken, self._logprobs = self._logprobs, []
        message.logprobs += taken
        return taken

    def _write_call(self, call: CallDelta) -> bytes:
        data = b""
        if call.call_id:
            data = self._close() + self._open(_Item("function_call", len(self._output), call))
        if not call.arguments:
            return data
        assert self._item is not None
        self._item.text += call.arguments
        return data + self._event("response.function_call_arguments.delta", **self._where(), delta=call.arguments)

    def _open(self, item: _Item) -> bytes:
        self._item = item
        begun = item.as_json("in_progress", has_content=False)
        data = self._event("response.output_item.added", output_index=item.index, item=begun)
        if item.call is None:
            data += self._event("response.content_part.added", **self._where(has_content=True), part=item.part())
        return data

    def _end(self) -> bytes:
        """Ends the output. An answer without any item gets an empty text."""
        data = b"" if self._output or self._item else self._open(_Item("message", 0, None))
        return data + self._close("incomplete" if self._reason == _LENGTH else "completed")

    def _close(self, status: str = "completed") -> bytes:
        """Ends the current item."""
        item = self._item
        if item is None:
            return b""
        if item.call is not None:
            data = self._event("response.function_call_arguments.done", **self._where(), arguments=item.text)
        else:
            where = self._where(has_content=True)
            more: dict[str, Any] = {}
            if item.kind == "message":
                self._take_logprobs(item)
                more["logprobs"] = item.logprobs
            data = self._event(f"{_TEXT_EVENTS[item.kind]}.done", **where, text=item.text, **more)
            data += self._event("response.content_part.done", **where, part=item.part())
        done = item.as_json(status)
        self._output.append(done)
        self._item = None
        return data + self._event("response.output_item.done", output_index=item.index, item=done)

    def _where(self, *, has_content: bool = False) -> dict[str, Any]:
        assert self._item is not None
        where: dict[str, Any] = {"item_id": self._item.identity, "output_index": self._item.index}
        return {**where, "content_index": 0} if has_content else where

    def _event(self, kind: str, **fields: Any) -> bytes:
        if self._is_whole:
            return b""
        body = {"type": kind, "sequence_number": self._event_count, **fields}
        self._event_count += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"

    def _ended(self, taken: Taken) -> dict[str, Any]:
        is_cut = self._reason == _LENGTH
        response = {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": usage_of(taken),
        }
        tokens = [*self._prompt, *self._tokens]
        self._on_end(Ended(response, tokens, len(self._prompt), taken))
        return response


def usage_of(taken: Taken) -> dict[str, Any]:
    """Returns `usage` in the form of responses."""
    return {
        "input_tokens": taken.prompt_token_count,
        "input_tokens_details": {
            "cached_tokens": taken.cached_token_count,
            "cache_write_tokens": taken.written_token_count,
        },
        "output_tokens": taken.output_token_count,
        "output_tokens_details": {"reasoning_tokens": taken.reasoning_token_count or 0},
        "total_tokens": taken.prompt_token_count + taken.output_token_count,
    }


def failed(head: Mapping[str, Any], error: ApiError) -> dict[str, Any]:
    """Returns a response that has failed."""
    told = error.body["error"]
    code = "rate_limit_exceeded" if told["type"] == RATE else "server_error"
    return {**head, "status": "failed", "error": {"code": code, "message": told["message"]}}
