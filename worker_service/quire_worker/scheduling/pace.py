"""Speed of this worker, measured in its own passes."""

from __future__ import annotations

from collections import deque

PASSES = 128  # number of passes to remember


class Pace:
    """The latest passes: the number of tokens and the seconds of each."""

    def __init__(self) -> None:
        self._passes = deque[tuple[int, float]](maxlen=PASSES)
        # Token counts and seconds of passes that mostly computed prompts. Their mean rate is the sum of
        # tokens over the sum of seconds, so one long prompt counts more than many short prompts.
        self._prefills = deque[tuple[int, float]](maxlen=PASSES)

    def observe(self, token_count: int, seconds: float, sample_count: int = 1) -> None:
        """Records a pass that computed any tokens, of `sample_count` samples."""
        if token_count:
            self._passes.append((token_count, seconds))
            if token_count >= 2 * sample_count:  # decoding alone computes one token per sample
                self._prefills.append((token_count, seconds))

    @property
    def pass_s(self) -> float:
        """Returns the seconds of the shortest pass: a lower bound for any pass. 0 before the first pass."""
        return min((seconds for _, seconds in self._passes), default=0.0)

    def tokens_per_s(self, least: int) -> float | None:
        """Returns the tokens per second of the pass with the most tokens; None if no pass had `least` tokens."""
        most = max(self._passes, default=(0, 0.0))
        return most[0] / most[1] if most[0] >= least and most[1] > 0 else None

    def seconds_for(self, token_count: int) -> float | None:
        """Returns the seconds for tokens of a prompt, judged by the pass with most tokens; None before any pass."""
        most = max(self._passes, default=None)
        return None if most is None else token_count * most[1] / most[0]

    def prefill_seconds_for(self, token_count: int) -> float:
        """Returns the seconds for tokens of a prompt, at the mean rate of the latest passes that mostly computed
        prompts; 0 before the first pass. Attention to a long prefix takes more time."""
        tokens = sum(count for count, _ in self._prefills)
        return token_count * sum(seconds for _, seconds in self._prefills) / tokens if tokens else 0.0
