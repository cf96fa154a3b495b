"""Prompts that continue what a model has said before: pure.

A model may write a text in other tokens than its tokenizer would. A conversation that is written down and tokenized
again then has the same text and other tokens, so the pages of the earlier answer are of no use to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple


class Said(NamedTuple):
    """Tokens of an earlier request and of its answer.

    Attributes:
        model: name of the checkpoint.
        tokens: of the prompt and the answer, without a token that ended it.
        prompt_token_count: how many of them are the prompt's.
    """

    model: str
    tokens: Sequence[int]
    prompt_token_count: int

    def is_begun_by(self, same: int) -> bool:
        """Tells whether a prompt that begins with so many of the tokens is of the same conversation. Its last token may
        have become one with the first of the answer. A text that only looks like the conversation has other tokens."""
        return same >= self.prompt_token_count - 1


def common_count(said: Sequence[int], prompt: Sequence[int]) -> int:
    """Returns how many tokens both begin with."""
    return next(
        (index for index, (one, other) in enumerate(zip(said, prompt, strict=False)) if one != other),
        min(len(said), len(prompt)),
    )


def continued(said: Sequence[int], prompt: Sequence[int], same: int, spelled: Mapping[int, bytes]) -> tuple[int, ...]:
    """Returns a prompt of the same text that begins with as many tokens of `said` as the text allows.

    Args:
        said: tokens of the request that is continued, and of its answer.
        prompt: tokens of the conversation, as its tokenizer splits them.
        same: tokens that both begin with.
        spelled: bytes of the tokens behind these.
    """
    theirs = [spelled[token] for token in said[same:]]
    ours = [spelled[token] for token in prompt[same:]]
    common = _common_length(b"".join(theirs), b"".join(ours))
    ends = {end: index for index, end in enumerate(accumulate(map(len, ours)), start=1) if end <= common}
    best = (0, 0)
    for index, end in enumerate(accumulate(map(len, theirs)), start=1):
        if end in ends:
            best = (index, ends[end])
    return (*said[: same + best[0]], *prompt[same + best[1] :])


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
