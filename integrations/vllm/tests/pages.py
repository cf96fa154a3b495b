"""A memory of pages in place of a model: each turn's attention is read back from the places in the tables.

Each pass writes its tokens into its blocks. It reads first, as attention would: of each group its window, and of states
the one after the last token before.
"""

from __future__ import annotations

from typing import Any, Final

STATE_SLOT: Final = 0  # the slot of a state in its block; writing a state loses the block's other contents


class Pages:
    """The pages of all groups, and of each request its tables and the tokens that it has at the worker.

    The worker knows its sampled tokens before the scheduler does, where passes are scheduled ahead.
    """

    def __init__(self, groups: tuple[tuple[str, int, int], ...]) -> None:
        self._groups = groups
        # (block, slot) -> the group that wrote it, a hash of all tokens up to it
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._tokens: dict[str, list[int]] = {}

    def start(self, request: Any, tables: Any) -> None:
        """Takes a request that runs for the first time, or again, with its whole tables."""
        self._tables[request.request_id] = [list(table) for table in tables]
        self._tokens[request.request_id] = list(request.all_token_ids)

    def add(self, name: str, blocks: Any) -> None:
        """Adds new blocks to the tables of a request that runs."""
        for table, added in zip(self._tables[name], blocks, strict=True):
            table.extend(added)

    def compute(self, request: Any, before: int, count: int, drafts: tuple[int, ...]) -> list[int]:
        """Reads the pages, writes the new tokens; returns the next tokens where the pass ends with the last one."""
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
        """Takes the state of the last token before from its block, as vLLM's worker does, and leaves the new one in
        that of the last token, and in vLLM's mode `all` at each edge of a block before it."""
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
        """Returns as many drafts as allowed, with the first few right."""
        tokens, drafts = tuple(self._tokens[name]), list[int]()
        right = len(tokens) % (most + 1)
        while len(drafts) < most:
            drafts.append(next_token((*tokens, *drafts)) + (len(drafts) >= right))
        return drafts


def content(request: Any, tokens: tuple[int, ...], position: int) -> int:
    """Returns the cached content of attention over a token and all before it, images among them."""
    images = [each.identifier for each in request.mm_features or () if each.mm_position.offset <= position]
    adapter = request.lora_request and request.lora_request.lora_name
    embeds = request.prompt_embeds
    given = None if embeds is None else embeds[: position + 1].numpy().tobytes()
    return hash((request.cache_salt, adapter, given, *images, tokens[: position + 1]))


def first_read(kind: str, window: int, token_count: int) -> int:
    """The first token that the one after so many others reads."""
    if kind == "sliding":
        return max(0, token_count - window + 1)
    return token_count // window * window if kind == "chunked" else 0


def next_token(tokens: tuple[int, ...]) -> int:
    """Returns the next token of the model that this replaces."""
    return hash(tokens) % 1000 + 1
