"""A memory of pages in place of a model: it checks that each turn's attention can be read back through the tables.

Each pass first reads what attention would read: the window of each group, and the state after the last computed token.
Then it writes its tokens into its blocks.
"""

from __future__ import annotations

from typing import Any, Final

STATE_SLOT: Final = 0  # the slot of a state in its block; writing a state loses the block's other contents


class Pages:
    """The pages of all groups, and each request's tables and tokens at the worker.

    If passes are scheduled ahead, the worker knows sampled tokens before the scheduler does.
    """

    def __init__(self, groups: tuple[tuple[str, int, int], ...]) -> None:
        self._groups = groups
        # (block, slot) -> (the group that wrote the slot, a hash of all tokens up to the slot's)
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._tokens: dict[str, list[int]] = {}

    def start(self, request: Any, tables: Any) -> None:
        """Adds a request that runs for the first time, or again, with its whole tables."""
        self._tables[request.request_id] = [list(table) for table in tables]
        self._tokens[request.request_id] = list(request.all_token_ids)

    def add(self, name: str, blocks: Any) -> None:
        """Adds new blocks to the tables of a request that runs."""
        for table, added in zip(self._tables[name], blocks, strict=True):
            table.extend(added)

    def compute(self, request: Any, before: int, count: int, drafts: tuple[int, ...]) -> list[int]:
        """Reads the pages and writes the new tokens. Returns the next tokens if the pass ends with the last known
        token."""
        name = request.request_id
        known = tuple(self._tokens[name])
        tokens = known + drafts
        for group, (kind, size, window) in enumerate(self._groups):
            table = self._tables[name][group]
            if kind in ("state", "states"):
                self._compute_state(request, tokens, group, before, count)
                continue
            for position in range(first_read(kind, window, before), before):
                seen = self._slots.get((table[position // size], position % size))
                assert seen == (group, content(request, tokens, position)), f"{name} reads another at {position}"
            for position in range(before, before + count):
                slot = table[position // size], position % size
                assert slot[0] > 0, "block 0 is vLLM's"
                self._slots[slot] = (group, content(request, tokens, position))
        if before + count < len(known):
            return []
        sampled = [next_token(known)]
        for draft in drafts:
            if draft != sampled[-1]:
                break
            sampled.append(next_token((*known, *sampled)))
        self._tokens[name] += sampled
        return sampled

    def _compute_state(self, request: Any, tokens: tuple[int, ...], group: int, before: int, count: int) -> None:
        """Reads the state of the previous token from its block, as vLLM's worker does, and writes the new state to the
        last token's block. In vLLM's mode `all` it also writes a state at each block edge before."""
        name = request.request_id
        table, size, last = self._tables[name][group], self._groups[group][1], before + count - 1
        if before:
            seen = self._slots.get((table[(before - 1) // size], STATE_SLOT))
            assert seen == (group, content(request, tokens, before - 1)), f"{name} goes on from another state"
        edges = range(before // size * size + size - 1, last, size) if self._groups[group][0] == "states" else ()
        for position in (*edges, last):
            assert table[position // size] > 0, "block 0 is vLLM's"
            self._slots[table[position // size], STATE_SLOT] = (group, content(request, tokens, position))

    def drafts(self, name: str, most: int) -> list[int]:
        """Returns `most` drafts; the first few of them are right."""
        tokens, drafts = tuple(self._tokens[name]), list[int]()
        right = len(tokens) % (most + 1)
        while len(drafts) < most:
            drafts.append(next_token((*tokens, *drafts)) + (len(drafts) >= right))
        return drafts


def content(request: Any, tokens: tuple[int, ...], position: int) -> int:
    """Returns the content that attention caches for a token: a hash of it and everything before it, images included."""
    images = [each.identifier for each in request.mm_features or () if each.mm_position.offset <= position]
    adapter = request.lora_request and request.lora_request.lora_name
    embeds = request.prompt_embeds
    given = None if embeds is None else embeds[: position + 1].numpy().tobytes()
    return hash((request.cache_salt, adapter, given, *images, tokens[: position + 1]))


def first_read(kind: str, window: int, token_count: int) -> int:
    """Returns the first token that the token after `token_count` tokens reads."""
    if kind == "sliding":
        return max(0, token_count - window + 1)
    return token_count // window * window if kind == "chunked" else 0


def next_token(tokens: tuple[int, ...]) -> int:
    """Returns the next token, in place of a model."""
    return hash(tokens) % 1000 + 1
