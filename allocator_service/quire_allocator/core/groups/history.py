"""Where recent prompts part, in pools without full attention: radix trees of digests, without blocks.

Full attention keeps whole prefixes, so its tree of runs knows what two prompts have in common. Windows and states keep
the end of a prefix only: two prompts that part early have nothing in common there, and nobody would ever know.

Lifecycle of a prompt:

    1. noted       a sequence was let in with these digests; noted again, it counts as new
    2. forgotten   the oldest first, with what no other prompt begins with, where there are too many
"""

from __future__ import annotations

from typing import Final

from quire_allocator.core.groups.partings import Behind
from quire_allocator.core.groups.stretches import common_positions
from quire_allocator.core.spec import DIGEST_BYTES

DIGESTS_MAX: Final = 262_144  # 8 MiB: with blocks of 16 tokens four prompts of a million
PROMPTS_MAX: Final = 4_096


class Passage:
    """Digests that follow one another in every prompt that has the first of them. A root has none.

    Attributes:
        parent: the passage before it; None for the root of a namespace.
        children: by their first digest.
        prompt_count: prompts that end in it or below.
    """

    __slots__ = ("children", "digests", "parent", "prompt_count")

    def __init__(self, parent: Passage | None, digests: bytes) -> None:
        self.parent = parent
        self.digests = digests
        self.children: dict[bytes, Passage] = {}
        self.prompt_count = 0


class PromptHistory:
    """The latest prompts of one pool, at most so many and of at most so many different digests.

    Attributes:
        digest_count: digests of all of them, those that prompts have in common counted once.
    """

    def __init__(self, digest_count_max: int = DIGESTS_MAX, prompt_count_max: int = PROMPTS_MAX) -> None:
        self.digest_count = 0
        self._digest_count_max = digest_count_max
        self._prompt_count_max = prompt_count_max
        self._roots: dict[str, Passage] = {}
        self._ends: dict[Passage, str] = {}  # where prompts end, the oldest first, and their namespaces

    def __len__(self) -> int:
        return len(self._ends)

    def common_count(self, namespace: str, digests: bytes) -> int:
        """Counts the leading digests that some prompt of the namespace begins with, too. Changes nothing."""
        passage, offset = self._roots.get(namespace), 0
        while passage is not None and offset < len(digests):
            passage = passage.children.get(digests[offset : offset + DIGEST_BYTES])
            if passage is not None:
                size = common_positions(passage.digests, digests, offset, len(digests)) * DIGEST_BYTES
                offset += size
                if size < len(passage.digests):
                    break
        return offset // DIGEST_BYTES

    def behind(self, namespace: str, digests: bytes, more: int) -> Behind:
        """Returns what prompts go on with behind these digests: nothing where none is known that begins so. One that is
        longer by `more` digests goes on. Changes nothing."""
        passage, offset = self._roots.get(namespace), 0
        while passage is not None and offset < len(digests):
            passage = passage.children.get(digests[offset : offset + DIGEST_BYTES])
            if passage is not None:
                size = common_positions(passage.digests, digests, offset, len(digests)) * DIGEST_BYTES
                if offset + size < len(digests) and size < len(passage.digests):
                    return Behind(0, False)
                offset += len(passage.digests)
        if passage is None:
            return Behind(0, False)
        left = (offset - len(digests)) // DIGEST_BYTES
        return Behind(1 if left else len(passage.children), _goes_on(passage, left, more))

    def note(self, namespace: str, digests: bytes) -> None:
        """A prompt of these digests was let in. If it alone has more than may be kept in all, its end is cut off."""
        digests = digests[: self._digest_count_max * DIGEST_BYTES]
        if not digests:
            return
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Passage(None, b"")
        end = self._walk(root, digests)
        if self._ends.pop(end, None) is None:
            passage: Passage | None = end
            while passage is not None:
                passage.prompt_count += 1
                passage = passage.parent
        self._ends[end] = namespace
        while self.digest_count > self._digest_count_max or len(self._ends) > self._prompt_count_max:
            self._forget_oldest()

    def _walk(self, root: Passage, digests: bytes) -> Passage:
        """Returns the passage that ends with the last of the digests, and makes what is missing on the way there."""
        passage, offset = root, 0
        while offset < len(digests):
            child = passage.children.get(digests[offset : offset + DIGEST_BYTES])
            if child is None:
                child = Passage(passage, digests[offset:])
                passage.children[digests[offset : offset + DIGEST_BYTES]] = child
                self.digest_count += len(child.digests) // DIGEST_BYTES
            size = common_positions(child.digests, digests, offset, len(digests)) * DIGEST_BYTES
            passage = child if size == len(child.digests) else _split(passage, child, size)
            offset += size
        return passage

    def _forget_oldest(self) -> None:
        end = next(iter(self._ends))
        namespace = self._ends.pop(end)
        passage = end
        while True:
            passage.prompt_count -= 1
            parent = passage.parent
            if parent is None:
                break
            if not passage.prompt_count:
                del parent.children[passage.digests[:DIGEST_BYTES]]
                self.digest_count -= len(passage.digests) // DIGEST_BYTES
                end = parent
            passage = parent
        if not passage.prompt_count:
            del self._roots[namespace]
        elif end.parent is not None and end not in self._ends and len(end.children) == 1:
            _merge(end, end.parent)

    def check_invariants(self) -> None:
        """Raises AssertionError unless every passage has prompts, parts from others, and counts as often as it is."""
        ends, digest_count = dict.fromkeys(self._ends, 0), 0
        pending = list(self._roots.values())
        assert all(root.prompt_count for root in pending), "a namespace without prompts is kept"
        while pending:
            passage = pending.pop()
            below = sum(child.prompt_count for child in passage.children.values())
            assert passage.prompt_count == below + (passage in ends), "a passage counts prompts that do not end below"
            assert passage.parent is None or passage in ends or len(passage.children) > 1, "two passages are one"
            digest_count += len(passage.digests) // DIGEST_BYTES
            for first, child in passage.children.items():
                assert child.digests[:DIGEST_BYTES] == first, "a passage is filed under another digest than its first"
                assert child.parent is passage, "a passage names another one as its parent"
                pending.append(child)
        assert digest_count == self.digest_count, f"{self.digest_count} digests count, {digest_count} are"
        assert digest_count <= self._digest_count_max, "more digests are kept than may be"
        assert len(ends) <= self._prompt_count_max, "more prompts are kept than may be"


def _goes_on(passage: Passage, left: int, more: int) -> bool:
    """Tells whether at least so many digests follow in some prompt, of which the passage itself has `left`."""
    if left >= more:
        return True
    ways = passage.children.values()
    return any(_goes_on(way, len(way.digests) // DIGEST_BYTES, more - left) for way in ways)


def _split(parent: Passage, passage: Passage, size: int) -> Passage:
    """Cuts a passage in two and returns the upper part, of so many bytes; the lower part stays the same object."""
    upper = Passage(parent, passage.digests[:size])
    upper.prompt_count = passage.prompt_count
    parent.children[upper.digests[:DIGEST_BYTES]] = upper
    passage.digests = passage.digests[size:]
    passage.parent = upper
    upper.children[passage.digests[:DIGEST_BYTES]] = passage
    return upper


def _merge(upper: Passage, parent: Passage) -> None:
    """Undoes a split, where no prompt parts or ends there any more."""
    (lower,) = upper.children.values()
    lower.digests = upper.digests + lower.digests
    lower.parent = parent
    parent.children[lower.digests[:DIGEST_BYTES]] = lower
