"""Prompts that continue earlier answers of a model. Pure.

A model may write a text with other tokens than its tokenizer would. Tokenizing the conversation again gives the same
text but other tokens, so the cached pages of the earlier answer would not be hit.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Parting(NamedTuple):
    """Places of the first tokens that differ, in the earlier conversation and in a prompt."""

    said: int
    prompt: int


class Said(NamedTuple):
    """Tokens of an earlier request and of its answer.

    Attributes:
        model: name of the checkpoint that answered.
        tokens: the tokens of the prompt and the answer, without a token that ended it.
        prompt_token_count: the number of tokens that belong to the prompt.
        as_split: the tokenizer's tokens for the same prompt. These differ from `tokens` if that prompt itself continued
            an answer.
    """

    model: str
    tokens: Sequence[int]
    prompt_token_count: int
    as_split: Sequence[int]

    def parting(self, prompt: Sequence[int]) -> Parting | None:
        """Returns the index where a prompt of the same conversation deviates from the tokens; None if it continues
        another conversation.

        A text that only looks like the conversation has other tokens. The last token of the earlier prompt may have
        merged with the first token of its answer.
        """
        same = common_count(self.as_split, prompt)
        missing = len(self.as_split) - same
        if missing > 1 or (missing and self.as_split[-1] != self.tokens[self.prompt_token_count - 1]):
            return None
        place = self.prompt_token_count - missing
        more = common_count(self.tokens[place:], prompt[same:])
        return Parting(place + more, same + more)


def common_count(said: Sequence[int], prompt: Sequence[int]) -> int:
    """Returns how many tokens at the beginning are equal."""
    return next(
        (index for index, (one, other) in enumerate(zip(said, prompt, strict=False)) if one != other),
        min(len(said), len(prompt)),
    )


def continued(
    said: Sequence[int], prompt: Sequence[int], parting: Parting, theirs: Sequence[bytes], ours: Sequence[bytes]
) -> tuple[int, ...]:
    """Returns a prompt of the same text that begins with as many tokens of `said` as the text allows.

    Args:
        said: tokens of the continued request and of its answer.
        prompt: tokens of the conversation, as the tokenizer splits them.
        parting: the index of the first difference.
        theirs: the bytes of `said` after that index.
        ours: the bytes of the prompt after it.
    """
    text, counts = _written(theirs)
    common = _common_length(text, b"".join(ours))
    own_counts = {end: count for count, end in enumerate(accumulate(map(len, ours)), start=1)}
    best = max((end for end in counts.keys() & own_counts.keys() if end <= common), default=0)
    return (*said[: parting.said + counts.get(best, 0)], *prompt[parting.prompt + own_counts.get(best, 0) :])


def _written(tokens: Sequence[bytes]) -> tuple[bytes, dict[int, int]]:
    """Returns the text of tokens as an answer writes it, and the count of tokens for each length at which a token ends.

    Bytes that are not UTF-8 become U+FFFD, as in the text that the caller got.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, counts = b"", {}
    for count, token in enumerate(tokens, start=1):
        text += decoder.decode(token, count == len(tokens)).encode()
        if not decoder.getstate()[0]:  # The token ends with a complete character.
            counts[len(text)] = count
    return text, counts


def _common_length(one: bytes, other: bytes) -> int:
    """Returns how many bytes at the beginning are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
