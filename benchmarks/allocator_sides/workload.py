"""The work that every side does, and how its cost is measured.

All sides get the same prompts and the same digests, made beforehand. Only operations with hashing in their name hash.
Costs are CPU time: of the thread in process, of both processes through the service.
"""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

BLOCK_TOKENS: Final = 16
DIGEST_BYTES: Final = 32
POOL_BLOCKS: Final = 100_000
LONG_BLOCKS: Final = 2_048
LONG_HIT_TOKENS: Final = LONG_BLOCKS * BLOCK_TOKENS
LONG_TOKENS: Final = LONG_HIT_TOKENS + BLOCK_TOKENS // 2  # Like most prompts, these end inside a block.
LONG_COUNT: Final = 24  # number of long prompts in a round; together they fill half of the pool
FILLER_COUNT: Final = 25  # number of further prompts; with them, every block is in use or cached
HASH_COUNT: Final = 3
SHORT_TOKENS: Final = 512
SHORT_BLOCKS: Final = SHORT_TOKENS // BLOCK_TOKENS
SHORT_COUNT: Final = 64
SEQUENCES: Final = 256  # sequences in a decode step
WINDOW_TOKENS: Final = 512
DECODE_STEPS: Final = BLOCK_TOKENS  # decode steps in a round; in so many, every sequence fills one block
VOCABULARY: Final = 150_000
SLIDING_GROUPS: Final = (0, 1, 5)  # groups of sliding windows, in addition to one group of full attention


class Operation(enum.StrEnum):
    """The measured operations, in microseconds each. Admitting includes publishing the blocks, as vLLM does both at
    once."""

    HASH = "hash a prompt of 32 k tokens"
    HASH_ARRAY = "the same, from an array of int32"
    ADMIT = "admit 32 k tokens, fresh"
    ADMIT_EVICTING = "admit 32 k tokens, evicting"
    ADMIT_HIT = "admit 32 k tokens, full hit"
    GRANT = "of it: allocating, fresh"
    GRANT_EVICTING = "of it: allocating, evicting"
    GRANT_HIT = "of it: allocating, full hit"
    FORK = "fork 32 k tokens"
    FREE = "free 32 k tokens"
    SHORT = "hash, admit and free 512 tokens"
    APPEND = "append a token, no block filled"
    DECODE_1 = "decode step, a sequence, 1 group"
    DECODE_2 = "decode step, a sequence, 1 full + 1 sliding"
    DECODE_6 = "decode step, a sequence, 1 full + 5 sliding"


DECODES: Final = dict(zip(SLIDING_GROUPS, (Operation.DECODE_1, Operation.DECODE_2, Operation.DECODE_6), strict=True))
Costs = dict[Operation, float]


class Round(NamedTuple):
    """The work of one round.

    Attributes:
        prompts: digests of `LONG_COUNT` long prompts, concatenated.
        fillers: digests of `FILLER_COUNT` further prompts.
        newcomers: digests of `LONG_COUNT` more prompts, admitted when the pool is full of cached blocks.
        tokens: the tokens of one long prompt.
        short: tokens of `SHORT_COUNT` prompts.
    """

    prompts: list[bytes]
    fillers: list[bytes]
    newcomers: list[bytes]
    tokens: list[int]
    short: list[list[int]]


def draw_round(number: int) -> Round:
    """Draws the work of a round; no two rounds have the same.

    The seed is text: Python treats the seeds 1 and -1 as the same, and the warm-up round has number -1.
    """
    dice = random.Random(f"round {number}")

    def long(count: int) -> list[bytes]:
        return [dice.randbytes(LONG_BLOCKS * DIGEST_BYTES) for _ in range(count)]

    def tokens(count: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(count)]

    short = [tokens(SHORT_TOKENS) for _ in range(SHORT_COUNT)]
    return Round(long(LONG_COUNT), long(FILLER_COUNT), long(LONG_COUNT), tokens(LONG_TOKENS), short)


class Decoded(NamedTuple):
    """A decoding sequence: the length of its prompt, and the digests of the blocks that it will fill."""

    prompt_tokens: int
    digests: bytes

    @property
    def prompt(self) -> bytes:
        """Returns the digests of the full blocks of its prompt."""
        return self.digests[: self.prompt_tokens // BLOCK_TOKENS * DIGEST_BYTES]

    def filled(self, tokens: int) -> bytes:
        """Returns the digest of the block that the last of `tokens` tokens filled; empty if it filled none."""
        if tokens % BLOCK_TOKENS or tokens == self.prompt_tokens:
            return b""
        return self.digests[(tokens // BLOCK_TOKENS - 1) * DIGEST_BYTES : tokens // BLOCK_TOKENS * DIGEST_BYTES]


def draw_decoded(rounds: int) -> list[Decoded]:
    """Draws sequences that are out of step with each other, so that equally many fill a block in every step."""
    dice = random.Random("decoded")
    blocks = SHORT_BLOCKS + 2 + rounds * DECODE_STEPS // BLOCK_TOKENS
    return [
        Decoded(SHORT_TOKENS + number % BLOCK_TOKENS, dice.randbytes(blocks * DIGEST_BYTES))
        for number in range(SEQUENCES)
    ]


def cpu_us(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> tuple[float, list[Any]]:
    """Calls a function with each of the arguments; returns CPU microseconds of this thread per call, and the results.

    The clock is read once for all calls, because reading it takes as long as the shortest call.
    """
    calls = list(calls)
    started = time.thread_time_ns()
    results = [function(*arguments) for arguments in calls]
    return (time.thread_time_ns() - started) / 1_000 / len(calls), results
