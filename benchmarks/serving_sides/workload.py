"""The requests of every side: random prompts, new in every round, so that no prompt is in a cache."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

# Kinds of workloads: which lengths vary within a round.
KINDS = ("one length", "varied prompts", "varied both")


@dataclass(frozen=True, slots=True)
class Workload:
    """The number and lengths of a round's requests."""

    kind: str  # one of KINDS
    request_count: int
    prompt_tokens: int  # length of the longest prompt
    output_tokens: int  # length of the longest output

    def draw(self, round_number: int, vocabulary: int) -> list[dict[str, Any]]:
        """Returns the requests of a round: `prompt`, and `output_tokens`, the number of tokens to generate.

        Varying lengths are between a quarter of the longest and the longest. The seed is text: Python treats the seeds
        1 and -1 as the same, and a repeated prompt would be cached.
        """
        dice = random.Random(f"{self.kind} {self.request_count} {round_number}")

        def length(longest: int, *, varies: bool) -> int:
            return dice.randint(max(longest // 4, 1), longest) if varies else longest

        requests = []
        for _ in range(self.request_count):
            count = length(self.prompt_tokens, varies=self.kind != KINDS[0])
            output = length(self.output_tokens, varies=self.kind == KINDS[2])
            prompt = [dice.randrange(1, vocabulary) for _ in range(count)]
            requests.append({"prompt": prompt, "output_tokens": output})
        return requests
