"""The memory that answers take before they are sent. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.sampling import Chunk, TokenLogprobs

from quire_gateway.asks import Ask
from quire_gateway.failures import ApiError, invalid

# The most logprob values of an answer. A token's own logprob is one value, and each alternative's logprob is one more.
LOGPROB_VALUES_MAX: Final = 1 << 19
# Bytes charged for a logprob and its token. They take 116 bytes as objects of a chunk, then 8 in arrays until all
# chunks have arrived, then 100 in the JSON of the logprobs and 100 more in the JSON of the whole answer.
VALUE_BYTES: Final = 240
TOKEN_BYTES: Final = 40
CHARACTER_BYTES: Final = 4  # bytes charged for a character of a text, including the JSON of the text


def bounded(ask: Ask, prompts: Sequence[Sequence[int]]) -> Ask:
    """Returns a request whose answer has at most `LOGPROB_VALUES_MAX` logprobs.

    A stream holds only the logprobs of its prompts at a time. If the caller did not choose the length of the answer,
    `max_tokens` is lowered until the logprobs fit.

    Args:
        ask: the request.
        prompts: the tokens of each prompt.

    Raises:
        ApiError: the answer may have more than `LOGPROB_VALUES_MAX` logprobs.
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
    """Returns the bytes that a chunk takes until it is sent: for a stream its logprobs, otherwise all of it."""
    values = ask.logprob_tellings * _value_count(chunk.logprobs) + _tellings(ask) * _value_count(chunk.prompt_logprobs)
    if ask.is_streamed:
        return VALUE_BYTES * values
    return VALUE_BYTES * values + TOKEN_BYTES * len(chunk.token_ids) + CHARACTER_BYTES * len(chunk.text)


def told_bytes_of(ask: Ask, chunk: Chunk) -> int:
    """Returns the bytes of a chunk that are freed when it is sent: in a stream, logprobs that are sent only once."""
    return VALUE_BYTES * _value_count(chunk.logprobs) if _is_told_at_once(ask) else 0


def _is_told_at_once(ask: Ask) -> bool:
    return ask.is_streamed and ask.logprob_tellings == 1


def _tellings(ask: Ask) -> int:
    """Returns how many times an answer sends the logprobs of a prompt.

    Each choice can have them twice: in its echo, and in a field of their own.
    """
    count = bool(ask.options.get("echo")) + (ask.prompt_logprob_count is not None)
    return 1 if ask.is_streamed else count * ask.choice_count


def _value_count(tokens: Sequence[TokenLogprobs]) -> int:
    return len(tokens) * (1 + len(tokens[0].top)) if tokens else 0


def _too_many(ask: Ask, name: str, count: int) -> ApiError:
    how = "ask for fewer" if ask.is_streamed else "use stream=true, or ask for fewer"
    what = f"{name} would have {count:,} values, but an answer may have at most {LOGPROB_VALUES_MAX:,}"
    return invalid(name, f"{what}: {how} choices, tokens or logprobs")
