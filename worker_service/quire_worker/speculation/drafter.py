"""A draft model: a second, smaller model of the same vocabulary, which proposes tokens for the served model.

At the end of each pass of the served model, when its tokens are sampled, the draft model reads the computed tokens.
The draft model proposes tokens for each sample that continues:

    the served model's pass   ... b c d     b is the last token, c and d were proposed. c is right, then x is sampled
    the draft model reads     [x]           it already has the keys of b and c, from its last proposals
    the draft model proposes  y z           y after x, then z after y. z itself is not read yet

The next pass computes x y z, and accepts tokens as long as the proposals are right. The draft model proposes its
likeliest token each time. Drafts change no text; see `scheduling/drafts.py`.

The draft model's keys and values are in pages of its own, under the same block ids: a block holds both models' keys of
the same tokens. So a prefix that is hit, forked or copied exists for both models, and the allocator knows only one
pool. A draft model has only layers of full attention, and uses the tables of the served model's first such group. Its
pages under the blocks of other groups stay unused.

Interval map of a sample's tokens after a pass, where the last proposals ended at `read`:

    [0, start)            in the draft model's pages, from earlier passes
    [start, read)         the same, if the last proposals were right
    [read, known)         read now: the tokens that the pass computed, and the token that was sampled last
    [known, known + k)    proposed; all but the last are read, in capacity that the sample holds ahead

Pages that return from host memory hold only the served model's keys, and so do the pages of a pass whose drafting
failed. Drafts after such pages are worse, but the text is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import structlog
import torch
from quire.protocol.outcomes import Copy
from quire.types import GroupKind, GroupSpec

from quire_worker.cache import KVCache
from quire_worker.execution.parts import Part, Token
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.paged_model import PagedModel
from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.room_ahead import last_of
from quire_worker.scheduling.slots import Proposal

log = structlog.get_logger()


class _Row(NamedTuple):
    """A sample, with the next tokens that the draft model must read.

    Attributes:
        first: the position of the first of `tokens`.
        computed: the number of tokens that the served model has computed; its next pass begins there.
        wanted: the most tokens that may be proposed after these; 0 for none.
    """

    part: Part
    first: int
    tokens: list[int]
    computed: int
    wanted: int

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


class Drafter:
    """The draft model of one engine. Only the model's thread uses it."""

    def __init__(self, model: PagedModel, block_count: int, groups: Sequence[GroupSpec], token_count: int) -> None:
        """Creates the pages of the draft model.

        Args:
            model: a model with only layers of full attention, and the groups' block size.
            block_count: the number of blocks of the pool.
            groups: the groups of the pool; at least one has full attention.
            token_count: the number of tokens proposed for each sample after each pass.

        Raises:
            ValueError: no group has full attention.
        """
        self.token_count = token_count
        self._model = model
        self._cache = KVCache(model.cache_spec, block_count, device=model.device)
        kinds = [group.kind for group in groups]
        self._group = kinds.index(GroupKind.FULL_ATTENTION)
        # for each sample after the last pass: where its next pass starts, and the end of the tokens that were read
        self._read: dict[Sample, tuple[int, int]] = {}
        self._has_failed = False

    @property
    def cache(self) -> KVCache:
        """Returns the pages of the draft model, under the ids of the pool's blocks."""
        return self._cache

    def propose(self, copies: Sequence[Copy], parts: Sequence[Part], tokens: Sequence[Token]) -> dict[Sample, Proposal]:
        """Reads the tokens of a pass, and proposes the tokens that may follow. Returns nothing if that fails. Blocks.

        Args:
            copies: copies of blocks before the pass.
            parts: the parts of the pass that did not fail.
            tokens: the tokens sampled after it.
        """
        try:
            self._copy(copies)
            return self._propose(self._rows_of(parts, tokens))
        except Exception as error:
            self._read = {}
            if not self._has_failed:  # Drafting may fail again with every pass, so the failure is logged once.
                self._has_failed = True
                log.warning("the draft model failed; passes continue without drafts", error=repr(error))
            return {}

    def _copy(self, copies: Sequence[Copy]) -> None:
        if copies:
            sources, destinations = [copy.source for copy in copies], [copy.destination for copy in copies]
            self._model.attention.copy_blocks(self._cache.buffers, sources, destinations)

    def _rows_of(self, parts: Sequence[Part], tokens: Sequence[Token]) -> list[_Row]:
        sampled: dict[Sample, list[int]] = {}
        parents = set[Sample]()
        for token in tokens:
            sampled.setdefault(token.draw.sample, []).append(token.token_id)
            if token.draw.parent is not token.draw.sample:
                parents.add(token.draw.parent)
        rows = []
        for part in parts:
            sample, own = part.sample, part.tokens[: len(part.tokens) - len(part.draft)]
            limit = min(len(part.tables[self._group]) * self._cache.spec.block_size, self._model.max_position)
            found = sampled.get(sample, [])
            # every sampled token except the last was drafted
            computed = part.start + len(own) + max(0, len(found) - 1)
            begins, read = self._read.get(sample, (0, 0))
            # If the part begins at another position, its tokens are read again.
            first = max(part.start, min(read, computed) if begins == part.start else 0)
            known = [*own, *found]
            if sample in parents:  # The forks write to copies of the last block, so no new token is read here.
                known = own
            known = known[first - part.start : max(0, limit - part.start)]
            end = first + len(known)
            goes_on = bool(found) and sample not in parents and end == computed + 1
            count = min(self.token_count, last_of(sample, limit) - end) if goes_on else 0
            if known:
                rows.append(_Row(part, first, known, computed, max(0, count)))
        return rows

    def _propose(self, rows: Sequence[_Row]) -> dict[Sample, Proposal]:
        read = {row.part.sample: row.end for row in rows}
        if not rows:
            self._read = {}
            return {}
        asked = [row for row in rows if row.wanted]
        proposed: dict[Sample, list[int]] = {row.part.sample: [] for row in asked}
        likeliest = self._likeliest([self._chunk(row, row.first, row.tokens, wanted=row.wanted > 0) for row in rows])
        while asked:
            for row, token in zip(asked, likeliest, strict=True):
                proposed[row.part.sample].append(token)
            asked = [row for row in asked if len(proposed[row.part.sample]) < row.wanted]
            if not asked:
                break
            chunks = []
            for row in asked:
                sample, end = row.part.sample, read[row.part.sample]
                chunks.append(self._chunk(row, end, proposed[sample][-1:], wanted=True))
                read[sample] = end + 1
            likeliest = self._likeliest(chunks)
        self._read = {row.part.sample: (row.computed, read[row.part.sample]) for row in rows}
        return {row.part.sample: Proposal(row.end, tuple(proposed[row.part.sample])) for row in rows if row.wanted}

    def _chunk(self, row: _Row, start: int, tokens: Sequence[int], *, wanted: bool) -> Chunk:
        tables = [row.part.tables[self._group]]
        return Chunk(tokens, start, tables, needs_logits=wanted, begun_with=row.part.sample.begun_with)

    def _likeliest(self, chunks: Sequence[Chunk]) -> list[int]:
        """Computes chunks, and returns the likeliest token after each chunk that needs logits."""
        batch = build_batch(chunks, groups=self._cache.spec.groups)
        logits = self._model.forward(batch.on(self._model.device), self._cache)
        found: list[int] = torch.argmax(logits, dim=-1).tolist()
        return found
