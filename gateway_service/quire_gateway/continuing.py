"""Prompts that continue what a model has said before: pure.

A model may write a text in other tokens than its tokenizer would. A conversation that is written down and tokenized
again then has the same text and other tokens, so the pages of the earlier answer are of no use to it.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple


class Parting(NamedTuple):
    """Places of the first tokens that are not the same in what was said and in a prompt."""

    said: int
    prompt: int


class Said(NamedTuple):
    """Tokens of an earlier request and of its answer.

    Attributes:
        model: name of the checkpoint.
        tokens: of the prompt and the answer, without a token that ended it.
        prompt_token_count: how many of them are the prompt's.
        as_split: tokens of the same prompt as its tokenizer splits it; where it continues an answer, `tokens` has
            that one's instead.
    """

    model: str
    tokens: Sequence[int]
    prompt_token_count: int
    as_split: Sequence[int]

    def parting(self, prompt: Sequence[int]) -> Parting | None:
        """Returns where a prompt of the same conversation leaves the tokens; None if it is of another one. A text that
        only looks like the conversation has other tokens. The last token of the earlier prompt may have become one with
        the first of its answer."""
        same = common_count(self.as_split, prompt)
        missing = len(self.as_split) - same
        if missing > 1 or (missing and self.as_split[-1] != self.tokens[self.prompt_token_count - 1]):
            return None
        place = self.prompt_token_count - missing
        more = common_count(self.tokens[place:], prompt[same:])
        return Parting(place + more, same + more)


def common_count(said: Sequence[int], prompt: Sequence[int]) -> int:
    """Returns how many tokens both begin with."""
    return next(
        (index for index, (one, other) in enumerate(zip(said, prompt, strict=False)) if one != other),
        min(len(said), len(prompt)),
    )


def continued(
    said: Sequence[int], prompt: Sequence[int], parting: Parting, spelled: Mapping[int, bytes]
) -> tuple[int, ...]:
    """Returns a prompt of the same text that begins with as many tokens of `said` as the text allows.

    Args:
        said: tokens of the request that is continued, and of its answer.
        prompt: tokens of the conversation, as its tokenizer splits them.
        parting: where both differ.
        spelled: bytes of the tokens behind it.
    """
    theirs, counts = _written([spelled[token] for token in said[parting.said :]])
    ours = [spelled[token] for token in prompt[parting.prompt :]]
    common = _common_length(theirs, b"".join(ours))
    own_counts = {end: count for count, end in enumerate(accumulate(map(len, ours)), start=1)}
    best = max((end for end in counts.keys() & own_counts.keys() if end <= common), default=0)
    return (*said[: parting.said + counts.get(best, 0)], *prompt[parting.prompt + own_counts.get(best, 0) :])


def _written(tokens: Sequence[bytes]) -> tuple[bytes, dict[int, int]]:
    """Returns tokens as an answer writes them, and their count by each length at which a token ends.

    Bytes that are no text become U+FFFD, so that is what a conversation has of them.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, counts = b"", {}
    for count, token in enumerate(tokens, start=1):
        text += decoder.decode(token, count == len(tokens)).encode()
        if not decoder.getstate()[0]:  # else the next token completes a character
            counts[len(text)] = count
    return text, counts


def _common_length(one: bytes, other: bytes) -> int:
    """Returns how many bytes both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
