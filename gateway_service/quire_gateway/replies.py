"""Answers in OpenAI's form: whole answers, and the events of streams. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import orjson
from quire.sampling import FinishReason, Usage

from quire_gateway import probabilities
from quire_gateway.calls.deltas import CallDelta, Delta
from quire_gateway.calls.deltas import OpenCall as CalledFunction
from quire_gateway.failures import ApiError
from quire_gateway.probabilities import Spelled, Told

DONE: Final = b"data: [DONE]\n\n"
_FINISH_REASONS: Final = {None: None, FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Taken(NamedTuple):
    """Tokens that a request took, summed over its prompts."""

    prompt_token_count: int = 0
    cached_token_count: int = 0
    output_token_count: int = 0
    reasoning_token_count: int | None = None  # a part of the output tokens; None if unknown
    written_token_count: int = 0  # prompt tokens that were written to the cache

    def plus(self, usage: Usage) -> Taken:
        """Returns the sum with the usage of one more prompt."""
        return Taken(
            self.prompt_token_count + usage.prompt_token_count,
            self.cached_token_count + usage.cached_token_count,
            self.output_token_count + usage.output_token_count,
            self.reasoning_token_count,
            self.written_token_count + usage.cache_write_token_count,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns `usage` in OpenAI's form."""
        usage: dict[str, Any] = {
            **self.so_far(),
            "prompt_tokens_details": {
                "cached_tokens": self.cached_token_count,
                "cache_write_tokens": self.written_token_count,
            },
        }
        if self.reasoning_token_count is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_token_count}
        return usage

    def so_far(self) -> dict[str, int]:
        """Returns the part of `usage` that is known before the end of an answer."""
        return {
            "prompt_tokens": self.prompt_token_count,
            "completion_tokens": self.output_token_count,
            "total_tokens": self.prompt_token_count + self.output_token_count,
        }


class Beside(NamedTuple):
    """Optional data of a text, or of a piece of it. Each field is None if it was not requested.

    Attributes:
        logprobs: logprobs of the tokens of the text or piece.
        token_ids: tokens of the text or piece, without a token that ends the text.
        prompt_token_ids: tokens of the prompt; in a stream, only with the first piece.
        taken: usage of the choice so far.
        stop_reason: with the last piece of a choice, the stop text or stop token that ended it.
    """

    logprobs: Mapping[str, Any] | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    taken: Taken | None = None
    stop_reason: str | int | None = None


NOTHING: Final = Beside()


class Answer(NamedTuple):
    """One choice, once it is complete.

    Attributes:
        text: its content.
        finish_reason: why it ended, in OpenAI's words.
        beside: optional data with the text.
        prompt_logprobs: logprobs of the prompt; None if they were not requested.
        reasoning: text of the reasoning; None if it is not separated from the content.
        calls: the functions that the answer calls.
        stop_reason: the stop text or stop token that ended it.
    """

    text: str
    finish_reason: str | None
    beside: Beside
    prompt_logprobs: Sequence[Any] | None = None
    reasoning: str | None = None
    calls: Sequence[CalledFunction] = ()
    stop_reason: str | int | None = None


class Form(Protocol):
    """The shape of one endpoint's answers."""

    def whole(self, answers: Sequence[Answer], taken: Taken) -> bytes:
        """Returns the answer to a request that is not streamed."""

    def opening(self, index: int, beside: Beside) -> bytes:
        """Returns the event that a choice begins with; empty if it needs none."""

    def piece(self, index: int, delta: Delta, finish_reason: str | None, beside: Beside) -> bytes:
        """Returns the event of a piece of one choice."""

    def logprobs(self, tokens: Sequence[Told], spelled: Spelled, offsets: Sequence[int]) -> Mapping[str, Any]:
        """Returns `logprobs` of tokens; `offsets` has the offset of each token in the text, in characters."""

    def ending(self, taken: Taken) -> bytes:
        """Returns the last events of a stream. `taken` is complete if usage was requested."""

    def failed(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that fails."""


def reason_of(finish_reason: FinishReason | None, *, has_called: bool = False) -> str | None:
    """Returns why a choice ended, in OpenAI's words."""
    reason = _FINISH_REASONS[finish_reason]
    return "tool_calls" if has_called and reason == "stop" else reason


def event(body: Mapping[str, Any]) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class _Form:
    """Base of the forms of completions and chats."""

    def __init__(
        self,
        *,
        identity: str,
        kind: str,
        piece_kind: str,
        created_s: int,
        model: str,
        with_usage: bool,
        fingerprint: str | None,
        service_tier: str | None,
    ) -> None:
        head = {"id": identity, "object": kind, "created": created_s, "model": model, "system_fingerprint": fingerprint}
        if service_tier is not None:  # There is one service tier, so the answer names it for any request.
            head["service_tier"] = "default"
        self._head, self._with_usage = head, with_usage
        self._piece_head = {**head, "object": piece_kind}
        # The events of a stream differ only in their choice, so the bytes before and after the choice are made once.
        self._before = b"data: " + orjson.dumps(self._piece_head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def _whole(
        self, choices: Iterable[Mapping[str, Any]], taken: Taken, further: Mapping[str, Any] = MappingProxyType({})
    ) -> bytes:
        return orjson.dumps({**self._head, "choices": list(choices), "usage": taken.as_json(), **further})

    def _event(
        self, choice: Mapping[str, Any], taken: Taken | None, further: Mapping[str, Any] = MappingProxyType({})
    ) -> bytes:
        if taken is None and not further:
            return self._before + orjson.dumps(choice) + self._after
        usage = {} if taken is None else {"usage": taken.so_far()}
        return event({**self._piece_head, "choices": [choice], **further, **usage})

    def ending(self, taken: Taken) -> bytes:
        usage = {**self._piece_head, "choices": [], "usage": taken.as_json()}
        return event(usage) + DONE if self._with_usage else DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body) + DONE


class CompletionForm(_Form, Form):
    """The shape of answers of /v1/completions."""

    def __init__(
        self,
        request_id: str,
        created_s: int,
        model: str,
        *,
        with_usage: bool,
        fingerprint: str | None = None,
        service_tier: str | None = None,
    ) -> None:
        super().__init__(
            identity=f"cmpl-{request_id}",
            kind="text_completion",
            piece_kind="text_completion",
            created_s=created_s,
            model=model,
            with_usage=with_usage,
            fingerprint=fingerprint or None,
            service_tier=service_tier,
        )

    def logprobs(self, tokens: Sequence[Told], spelled: Spelled, offsets: Sequence[int]) -> Mapping[str, Any]:
        return probabilities.of_completion(tokens, spelled, offsets)

    def whole(self, answers: Sequence[Answer], taken: Taken) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            choice = _completion_choice(index, answer.text, answer.finish_reason, answer.beside)
            choice["stop_reason"] = answer.stop_reason
            if answer.prompt_logprobs is not None:
                choice["prompt_logprobs"] = answer.prompt_logprobs
            choices.append(choice)
        return self._whole(choices, taken)

    def opening(self, index: int, beside: Beside) -> bytes:
        return b""

    def piece(self, index: int, delta: Delta, finish_reason: str | None, beside: Beside) -> bytes:
        return self._event(_completion_choice(index, delta.content, finish_reason, beside), beside.taken)


class ChatForm(_Form, Form):
    """The shape of answers of /v1/chat/completions."""

    def __init__(
        self,
        request_id: str,
        created_s: int,
        model: str,
        *,
        with_usage: bool,
        fingerprint: str | None = None,
        service_tier: str | None = None,
    ) -> None:
        super().__init__(
            identity=f"chatcmpl-{request_id}",
            kind="chat.completion",
            piece_kind="chat.completion.chunk",
            created_s=created_s,
            model=model,
            with_usage=with_usage,
            fingerprint=fingerprint or None,
            service_tier=service_tier,
        )

    def logprobs(self, tokens: Sequence[Told], spelled: Spelled, offsets: Sequence[int]) -> Mapping[str, Any]:
        return probabilities.of_chat(tokens, spelled)

    def whole(self, answers: Sequence[Answer], taken: Taken) -> bytes:
        choices = (
            {
                "index": index,
                "message": _message(answer),
                "logprobs": answer.beside.logprobs,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                **_own_ids(answer.beside),
            }
            for index, answer in enumerate(answers)
        )
        # A chat has one prompt, so the prompt's data is next to the choices, not in them.
        of_prompt = {"prompt_logprobs": answers[0].prompt_logprobs, **_prompt_ids(answers[0].beside)}
        return self._whole(choices, taken, {name: value for name, value in of_prompt.items() if value is not None})

    def opening(self, index: int, beside: Beside) -> bytes:
        choice = _chat_choice(index, {"role": "assistant", "content": ""}, None, NOTHING)
        return self._event(choice, beside.taken, _prompt_ids(beside))

    def piece(self, index: int, delta: Delta, finish_reason: str | None, beside: Beside) -> bytes:
        choice = _chat_choice(index, _delta(delta), finish_reason, beside)
        return self._event(choice, beside.taken)


def _message(answer: Answer) -> dict[str, Any]:
    """Returns the message of a complete choice. If there are calls, an empty text becomes null."""
    text = None if answer.calls and not answer.text else answer.text
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if answer.reasoning is not None:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.function, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


def _delta(delta: Delta) -> dict[str, Any]:
    """Returns the `delta` of a piece of a choice."""
    told: dict[str, Any] = {}
    if delta.reasoning:
        told |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if delta.content:
        told["content"] = delta.content
    if delta.calls:
        told["tool_calls"] = [_call_delta(call) for call in delta.calls]
    return told


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.call_id:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    function = {"name": call.function, "arguments": call.arguments}
    return {"index": call.number, "id": call.call_id, "type": "function", "function": function}


def _completion_choice(index: int, text: str, finish_reason: str | None, beside: Beside) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": beside.logprobs, "finish_reason": finish_reason}
    if beside.token_ids is None and beside.stop_reason is None:
        return choice
    return {**choice, **_own_ids(beside), **_prompt_ids(beside)}


def _chat_choice(index: int, delta: Mapping[str, Any], finish_reason: str | None, beside: Beside) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": beside.logprobs, "finish_reason": finish_reason}
    return {**choice, **_own_ids(beside)}


def _own_ids(beside: Beside) -> dict[str, Any]:
    own: dict[str, Any] = {} if beside.token_ids is None else {"token_ids": beside.token_ids}
    return own if beside.stop_reason is None else {**own, "stop_reason": beside.stop_reason}


def _prompt_ids(beside: Beside) -> dict[str, Any]:
    return {} if beside.prompt_token_ids is None else {"prompt_token_ids": beside.prompt_token_ids}


def models(served: Iterable[tuple[str, tuple[str, int, int, str, str]]]) -> bytes:
    """Returns the answer of /v1/models. `served` has the arguments of `model` for each model."""
    return orjson.dumps({"object": "list", "data": [model(*each) for each in served]})


def model(called: str, about: tuple[str, int, int, str, str]) -> dict[str, Any]:
    """Returns one model in OpenAI's form. `root` is the model's name in answers. The `parent` of an adapter is its
    checkpoint.

    Args:
        called: a name that requests may use.
        about: the first five fields of a `Model`, up to `adapter`.
    """
    name, created_s, sequence_tokens_max, base, adapter = about
    return {
        "id": called,
        "object": "model",
        "created": created_s,
        "owned_by": "quire",
        "root": name,
        "parent": base if adapter else None,
        "max_model_len": sequence_tokens_max,
    }
