"""Logprobs as callers know them. Pure: what tokens are comes in as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from quire.sampling import TokenLogprobs

LOGPROB_MIN: Final = -9999.0  # for -inf, which JSON cannot say; as OpenAI has it


class Told(NamedTuple):
    """A token of an answer, or of its prompt, whose first token has no probability."""

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


def told_of(tokens: Iterable[TokenLogprobs], top_count: int) -> list[Told]:
    """Returns tokens of a sample, with so many of the likeliest in the place of each."""
    return [
        Told(
            token.token_id,
            max(token.logprob, LOGPROB_MIN),
            [(number, max(logprob, LOGPROB_MIN)) for number, logprob in token.top[:top_count]],
        )
        for token in tokens
    ]


def told_of_prompt(first_token: int, rest: Iterable[TokenLogprobs], top_count: int) -> list[Told]:
    """Returns all tokens of a prompt."""
    return [Told(first_token, None, ()), *told_of(rest, top_count)]


def token_ids(tokens: Iterable[Told]) -> set[int]:
    """Returns all tokens that are named."""
    return {number for token in tokens for number in (token.token_id, *(other for other, _ in token.top))}


def of_completion(tokens: Sequence[Told], spelled: Mapping[int, bytes], text_offset: int) -> dict[str, Any]:
    """Returns `logprobs` of a choice, or of a piece of it.

    Args:
        tokens: in their order.
        spelled: what each of them is.
        text_offset: characters before them.
    """
    texts = [_text(spelled[token.token_id]) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(text_offset)
        text_offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token, spelled) for token in tokens],
        "text_offset": offsets,
    }


def of_chat(tokens: Sequence[Told], spelled: Mapping[int, bytes]) -> dict[str, Any]:
    """Returns `logprobs` of a choice, or of a piece of it."""
    content = [
        {
            **_described(token.token_id, token.logprob, spelled),
            "top_logprobs": [_described(other, logprob, spelled) for other, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def of_prompt(tokens: Iterable[Told], spelled: Mapping[int, bytes]) -> list[dict[str, Any] | None]:
    """Returns `prompt_logprobs` as vLLM has them: for each token but the first the likeliest ones in its place, and
    itself, by their ids. The rank of one that is not among them is not known."""
    found: list[dict[str, Any] | None] = []
    for token in tokens:
        if token.logprob is None:
            found.append(None)
            continue
        ranks = {number: rank for rank, (number, _) in enumerate(token.top, start=1)}
        described = {
            str(number): {"logprob": logprob, "rank": ranks.get(number), "decoded_token": _text(spelled[number])}
            for number, logprob in ((token.token_id, token.logprob), *token.top)
        }
        found.append(described)
    return found


def _top(token: Told, spelled: Mapping[int, bytes]) -> dict[str, float] | None:
    """Returns the likeliest tokens and the one itself; of equal texts, the likelier one."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for number, logprob in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(_text(spelled[number]), logprob)
    return found


def _described(token_id: int, logprob: float | None, spelled: Mapping[int, bytes]) -> dict[str, Any]:
    data = spelled[token_id]
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
