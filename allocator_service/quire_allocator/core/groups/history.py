"""The beginnings of recent prompts, in pools without full attention.

Full attention keeps whole prefixes, so its tree of runs shows which blocks two prompts have in common. Windows and
states keep only the end of a prefix, so they cannot show what two early diverging prompts have in common.
"""

from __future__ import annotations

from typing import Final

from quire_allocator.core.spec import DIGEST_BYTES

DIGESTS_MAX: Final = 32_768  # most digests that one pool remembers: 6 MiB


class PromptHistory:
    """The digests of the latest prompts of one pool. The first digests of a prompt are forgotten last."""

    def __init__(self, digest_count_max: int = DIGESTS_MAX) -> None:
        self._digest_count_max = digest_count_max
        self._seen: dict[tuple[str, bytes], None] = {}  # namespace and digest, the oldest first

    def __len__(self) -> int:
        return len(self._seen)

    def common_count(self, namespace: str, digests: bytes) -> int:
        """Counts the leading digests that another prompt of the namespace had. Changes nothing."""
        low, high = 0, len(digests) // DIGEST_BYTES
        while low < high:  # a binary search: while a digest is remembered, all digests before it are, too
            middle = (low + high + 1) // 2
            if (namespace, digests[(middle - 1) * DIGEST_BYTES : middle * DIGEST_BYTES]) in self._seen:
                low = middle
            else:
                high = middle - 1
        return low

    def note(self, namespace: str, digests: bytes) -> None:
        """Remembers a prompt. Beyond the limit, it cuts the end off the prompt and forgets the oldest digests."""
        seen = self._seen
        for count in range(min(len(digests) // DIGEST_BYTES, self._digest_count_max), 0, -1):
            key = namespace, digests[(count - 1) * DIGEST_BYTES : count * DIGEST_BYTES]
            seen.pop(key, None)
            seen[key] = None
        while len(seen) > self._digest_count_max:
            del seen[next(iter(seen))]
