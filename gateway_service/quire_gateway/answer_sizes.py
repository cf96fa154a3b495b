"""The memory that answers take before they are sent: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.sampling import Chunk, TokenLogprobs

from quire_gateway.asks import Ask
from quire_gateway.failures import ApiError, invalid

LOGPROB_VALUES_MAX: Final = 1 << 19  # of an answer: those of its tokens, and of the likeliest ones in their places
VALUE_BYTES: Final = 240  # a logprob and its token take 116 in a chunk, 8 until all are there, then 100 as JSON, twice
TOKEN_BYTES: Final = 40
CHARACTER_BYTES: Final = 4  # of a text, and of its JSON


def bounded(ask: Ask, prompts: Sequence[Sequence[int]]) -> Ask:
    """Returns what is asked, if its answer has no more logprobs than are held at a time. A stream holds those of its
    prompts. An answer whose length its caller did not choose is cut to fit.

    Args:
        ask: what is asked.
        prompts: its tokens.

    Raises:
        ApiError: the answer may have more.
    """
    of_prompt = ask.options.get("prompt_logprobs")
    count = 0 if of_prompt is None else _tellings(ask) * (1 + of_prompt) * sum(map(len, prompts))
    if count > LOGPROB_VALUES_MAX:
        raise _too_many(ask, ask.names["prompt_logprobs"], count)
    if ask.top_logprob_count is None or _is_told_at_once(ask):
        return ask
    of_token = len(prompts) * ask.choice_count * (1 + ask.top_logprob_count) * ask.logprob_tellings
    room = (LOGPROB_VALUES_MAX - count) // of_token
    if room and (ask.max_tokens is None or ask.is_cut_to_fit):
        return ask._replace(max_tokens=min(ask.max_tokens or room, room), is_cut_to_fit=True)
    if ask.max_tokens is None or ask.max_tokens > room:
        raise _too_many(ask, ask.names["logprobs"], count + of_token * (ask.max_tokens or 1))
    return ask


def bytes_of(ask: Ask, chunk: Chunk) -> int:
    """Returns what a chunk takes until it is told: of a stream its logprobs, else all of it."""
    values = ask.logprob_tellings * _value_count(chunk.logprobs) + _tellings(ask) * _value_count(chunk.prompt_logprobs)
    if ask.is_streamed:
        return VALUE_BYTES * values
    return VALUE_BYTES * values + TOKEN_BYTES * len(chunk.token_ids) + CHARACTER_BYTES * len(chunk.text)


def told_bytes_of(ask: Ask, chunk: Chunk) -> int:
    """Returns what of that a chunk takes no more once it is told: what is told once, in a stream."""
    return VALUE_BYTES * _value_count(chunk.logprobs) if _is_told_at_once(ask) else 0


def _is_told_at_once(ask: Ask) -> bool:
    return ask.is_streamed and ask.logprob_tellings == 1


def _tellings(ask: Ask) -> int:
    """Returns how often an answer tells the logprobs of a prompt: in each choice, before its text and apart from it."""
    count = bool(ask.options.get("echo")) + (ask.prompt_logprob_count is not None)
    return 1 if ask.is_streamed else count * ask.choice_count


def _value_count(tokens: Sequence[TokenLogprobs]) -> int:
    return len(tokens) * (1 + len(tokens[0].top)) if tokens else 0


def _too_many(ask: Ask, name: str, count: int) -> ApiError:
    how = "ask for fewer" if ask.is_streamed else "stream, or ask for fewer"
    what = f"{name} would be {count:,} values, and an answer has at most {LOGPROB_VALUES_MAX:,}"
    return invalid(name, f"{what}: {how} choices, tokens or logprobs")
