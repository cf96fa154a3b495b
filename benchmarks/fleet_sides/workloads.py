"""Workloads of a fleet: requests with their arrival times, drawn from a seed.

Digests are random bytes: equal prefixes have equal digests, and nothing else of a digest matters to a pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

BLOCK_TOKENS: Final = 16
DIGEST_BYTES: Final = 32
PREFIXES: Final = 150
WARM_UP_RATE: Final = 6.0  # requests a second in the unmeasured beginning, in which caches fill
WARM_UP_S: Final = PREFIXES / WARM_UP_RATE + 5.0


@dataclass(slots=True, eq=False)
class Request:
    """One request, and what became of it.

    Attributes:
        digests: of the prompt's full blocks, and those of its answer.
        is_measured: False in the time in which caches fill.
        next_turn: the request that follows this one's end by `think_s`.
        promised_tokens: tokens that its router expected to be reused at the chosen worker, at the last try.
        hit_tokens: prompt tokens that were reused, in all tries.
        computed_tokens: prompt tokens that were computed, in all tries.
    """

    arrival_s: float
    digests: bytes
    prompt_tokens: int
    output_tokens: int
    next_turn: Request | None = None
    think_s: float = 0.0
    is_measured: bool = True
    gateway: int = 0
    promised_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    first_token_s: float | None = None
    excluded: set[int] = field(default_factory=set)

    @property
    def matchable(self) -> bytes:
        """Returns the digests that a hit may cover: a prompt's last token is always computed."""
        return self.digests[: (self.prompt_tokens - 1) // BLOCK_TOKENS * DIGEST_BYTES]


def prefixes(
    seed: int, *, rate: float, seconds: float, shared: int = 6_000, length: int = 7_200, weights: Sequence[float] = ()
) -> list[Request]:
    """Returns prompts of `length` tokens. Each begins with one of `PREFIXES` prefixes of `shared` tokens.

    First each prefix comes once, slowly and unmeasured. `weights` say how often each prefix comes; without weights, all
    come equally often.
    """
    draw = random.Random(f"prefixes {seed}")
    heads = [draw.randbytes(shared // BLOCK_TOKENS * DIGEST_BYTES) for _ in range(PREFIXES)]
    requests = []
    for number, head in enumerate(heads):
        own = draw.randbytes((length - shared) // BLOCK_TOKENS * DIGEST_BYTES)
        requests.append(Request(number / WARM_UP_RATE, head + own, length, 32, is_measured=False))
    time = WARM_UP_S + draw.expovariate(rate)
    while time < WARM_UP_S + seconds:
        own = draw.randbytes((length - shared) // BLOCK_TOKENS * DIGEST_BYTES)
        requests.append(Request(time, draw.choices(heads, weights or None)[0] + own, length, draw.randint(32, 96)))
        time += draw.expovariate(rate)
    return requests


def uneven(seed: int, *, rate: float, seconds: float) -> list[Request]:
    """Returns `prefixes` whose n-th most frequent one comes 1/n as often as the first."""
    return prefixes(seed, rate=rate, seconds=seconds, weights=[1 / (rank + 1) for rank in range(PREFIXES)])


def burst(
    seed: int, *, start: float = 0.0, children: int = 43, shared: int = 41_000, own: int = 1_000, output: int = 64
) -> list[Request]:
    """Returns children of one prompt that arrive 5 to 100 ms apart."""
    draw = random.Random(f"burst {seed} {start}")
    head = draw.randbytes(shared // BLOCK_TOKENS * DIGEST_BYTES)
    requests, time = [], start
    for _ in range(children):
        time += draw.uniform(0.005, 0.1)
        tail = draw.randbytes(own // BLOCK_TOKENS * DIGEST_BYTES)
        requests.append(Request(time, head + tail, shared + own, output))
    return requests


def bursts_in_traffic(seed: int, *, rate: float, seconds: float, every_s: float = 10.0) -> list[Request]:
    """Returns `prefixes` with a burst every `every_s` seconds."""
    requests = prefixes(seed, rate=rate, seconds=seconds)
    start = WARM_UP_S + every_s / 2
    while start < WARM_UP_S + seconds:
        requests += burst(seed, start=start)
        start += every_s
    return sorted(requests, key=lambda request: request.arrival_s)


def agents(seed: int, *, rate: float, seconds: float, turns: int = 8) -> list[Request]:
    """Returns the first turns of agents. A first turn has one of four system prompts of 8,000 tokens. Each turn adds a
    tool's result of 100 to 2,000 tokens, half a second to 3 s after the previous answer."""
    draw = random.Random(f"agents {seed}")
    heads = [draw.randbytes(8_000 // BLOCK_TOKENS * DIGEST_BYTES) for _ in range(4)]
    requests, time = [], draw.expovariate(rate)
    while time < seconds:
        digests, length, before = draw.choice(heads), 8_000, None
        for _ in range(turns):
            length += draw.randint(100, 2_000)
            output = draw.randint(32, 200)
            missing = (length + output) // BLOCK_TOKENS - len(digests) // DIGEST_BYTES
            digests += draw.randbytes(missing * DIGEST_BYTES)
            request = Request(time, digests, length, output, think_s=draw.uniform(0.5, 3))
            if before is None:
                requests.append(request)
            else:
                before.next_turn = request
            before, length = request, length + output
        time += draw.expovariate(rate)
    return requests
