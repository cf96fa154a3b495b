"""Rebuilds a pool from its owner's report: the same sequences on the same blocks, with the published blocks ready to be
hit.

    1. read      published blocks, group by group, as each manager files them; while the report comes in
    2. locate    every sequence's tables among them; private blocks are claimed, half-filled ones may be shared by forks
    3. build     runs and units, first all as cached, then held by the sequences
    4. compare   every table with the reported one, as its sequence is opened; all other blocks are empty
    5. restore   where hits can end: where stretches and paths end
    6. queue     entries without holders, in their order of release: they are evicted in that order

The rebuild writes only to a new pool. The caller puts the complete pool in force: a refused report changes nothing.

Some state is not in the report, and starts empty. Prompts that are being computed are not announced, so a second prompt
with the same prefix is computed as well. Policies know only that runs with several continuations were shared. Only full
attention knows where earlier prompts diverge. No checkpoint counts as made by its sequence. Counters begin at 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol

from quire_allocator.core.groups.manager import AnyManager
from quire_allocator.core.pool import Pool
from quire_allocator.core.rebuild.report import (
    BlockUse,
    Report,
    ReportedSequence,
    ReportedStretch,
    check_block_ids,
    refuse,
)
from quire_allocator.core.rebuild.runs import RunBuilder
from quire_allocator.core.rebuild.stops import restore
from quire_allocator.core.rebuild.units import StateBuilder, UnitBuilder, WindowBuilder
from quire_allocator.core.retention.stop import Run, Unit
from quire_allocator.core.scopes import Namespace, Scoped
from quire_allocator.core.sequence import Part, SequenceState
from quire_allocator.core.spec import DIGEST_BYTES, NULL_BLOCK, GroupKind, PoolSpec


class Builder(Protocol):
    """Rebuilds the state of one manager. The methods are called in this order, each for the whole report."""

    def read(self, prefix: ReportedStretch, column: int, first_place: int) -> None:
        """Takes in published blocks of the manager's group number `column`; see `BlockUse.publish` for places."""

    def locate(self, space: Namespace, sequence: ReportedSequence) -> Callable[[], Part]:
        """Finds a sequence's tables. Returns a function that takes the sequence's references and makes its part, once
        everything is built."""

    def build(self, spaces: dict[str, Namespace], ranks: array[int]) -> list[tuple[int, int, Scoped]]:
        """Files all published blocks; returns rank, position and entry of the blocks without holders."""


BUILDERS: dict[GroupKind, Callable[[AnyManager, Pool, BlockUse], Builder]] = {
    GroupKind.FULL_ATTENTION: RunBuilder,
    GroupKind.SLIDING_WINDOW: WindowBuilder,
    GroupKind.CHUNKED_LOCAL: WindowBuilder,
    GroupKind.STATE: StateBuilder,
}


class Rebuild:
    """A pool under construction, which no caller can reach yet.

    1. read      published blocks, prefix by prefix, as the report comes in
    2. finish    everything else, at once

    Attributes:
        use: users of the blocks that were read so far.

    Raises:
        Refusal: MALFORMED, from both, if the report does not fit the specification or contradicts itself.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self._pool = pool = Pool(spec)
        pool.blocks.take(spec.block_count)
        self.use = BlockUse(spec)
        self._builders = [BUILDERS[manager.spec.kind](manager, pool, self.use) for manager in pool.managers]
        self._places = {
            group: (builder, column)
            for manager, builder in zip(pool.managers, self._builders, strict=True)
            for column, group in enumerate(manager.groups)
        }

    def read(self, prefix: ReportedStretch) -> None:
        """Takes in a stretch of consecutive published blocks."""
        if prefix.group not in self._places:
            refuse(f"group {prefix.group} does not exist: the pool has {len(self._places)} groups, from 0")
        if len(prefix.digests) != len(prefix.blocks) * DIGEST_BYTES or not prefix.blocks:
            refuse("a prefix must have at least one block, and one digest for each block")
        if len(prefix.parent_digest) not in (0, DIGEST_BYTES):
            refuse("a parent digest must have 32 bytes")
        self._pool.coordinator.space(prefix.namespace)
        builder, column = self._places[prefix.group]
        builder.read(prefix, column, self.use.publish(prefix.blocks))

    def finish(self, report: Report) -> Pool:
        """Makes the pool that the report describes."""
        pool, builders, space = self._pool, self._builders, self._pool.coordinator.space
        for prefix in report.prefixes:
            self.read(prefix)
        _check_ids(report)
        located = [_locate(space(each.namespace), builders, each) for each in report.sequences]
        ranks = _ranks(pool.spec, report)
        cached = [item for builder in builders for item in builder.build(pool.blocks.namespaces, ranks)]
        for reported, found in zip(report.sequences, located, strict=True):
            _open(pool, space(reported.namespace), reported, found)
        restore(pool, {n: b.links for n, b in enumerate(builders) if isinstance(b, UnitBuilder)})
        _queue(pool, cached)
        pool.blocks.give_back(self.use.unused())
        pool.last_sequence_id = report.last_sequence_id
        for each in list(pool.blocks.namespaces.values()):
            pool.admission.enforce_cache_quota(each)
            pool.blocks.forget_if_unused(each)
        pool.blocks.evicted_count = pool.blocks.quota_evicted_count = 0
        pool.log.discard()
        return pool


def _ranks(spec: PoolSpec, report: Report) -> array[int]:
    """Returns each block's rank in the order of release; -1 if it was never released."""
    ranks = array("i", [-1]) * spec.block_id_end
    check_block_ids(spec, report.released)
    for rank, block in enumerate(report.released):
        ranks[block] = rank
    return ranks


def _check_ids(report: Report) -> None:
    last = 0
    for sequence in report.sequences:
        if sequence.sequence_id <= last:
            refuse(f"sequence {sequence.sequence_id} comes after {last}: ids must rise, and begin at 1 or above")
        last = sequence.sequence_id
    if last > report.last_sequence_id:
        refuse(f"sequence {last} is above last_sequence_id, {report.last_sequence_id}")


def _locate(space: Namespace, builders: list[Builder], sequence: ReportedSequence) -> list[Callable[[], Part]]:
    if sequence.committed_token_count > sequence.token_count:
        refuse(f"sequence {sequence.sequence_id} has more committed tokens than tokens")
    space.sequence_count += 1
    return [builder.locate(space, sequence) for builder in builders]


def _open(pool: Pool, space: Namespace, reported: ReportedSequence, parts: list[Callable[[], Part]]) -> None:
    made = tuple([make() for make in parts])
    turn = pool.coordinator.retention.rules.told(reported.told, reported.prompt_token_count)
    sequence = SequenceState(space, reported.token_count, reported.priority, made, turn)
    sequence.committed_token_count = reported.committed_token_count
    pool.sequences[reported.sequence_id] = sequence
    tables = zip(pool.tables(sequence), _own_tables(reported), strict=True)
    if any(table.tobytes() != given.tobytes() for table, given in tables):
        refuse(f"the tables of sequence {reported.sequence_id} have other blocks than its digests")
    if 0 < reported.chunk_token_count < reported.prompt_token_count:
        sequence.prompt_token_count = reported.prompt_token_count
        sequence.chunk_token_count = reported.chunk_token_count
        pool.admission.promise(sequence)


def _own_tables(reported: ReportedSequence) -> Sequence[array[int]]:
    """Returns the tables as the owner has them, with its own blocks in place of twins."""
    if not reported.kept:
        return reported.tables
    return [
        array("I", [block if own == NULL_BLOCK else own for block, own in zip(table, kept)])
        for table, kept in zip(reported.tables, reported.kept)
    ]


def _queue(pool: Pool, cached: list[tuple[int, int, Scoped]]) -> None:
    """Queues the entries without holders, and sets each sequence's `limit` and `quiet_until`."""
    cached.sort(key=itemgetter(1), reverse=True)
    cached.sort(key=itemgetter(0))
    for _, _, entry in cached:
        count = entry.block_count
        pool.blocks.now_held(entry, count)  # held only until the lines below cache the entry again
        if isinstance(entry, Unit):
            pool.coordinator.retention.cached(entry, count)
        elif isinstance(entry, Run):
            # A lower bound of the hits: each continuation after the first came from a prompt that shared this run.
            entry.hits = max(0, len(entry.children) - 1)
            pool.coordinator.retention.assess(entry)
            pool.blocks.now_cached(entry, count, is_candidate=not entry.children)
    for sequence in pool.sequences.values():
        pool.coordinator.note_limit(sequence)
        pool.coordinator.settle(sequence)
