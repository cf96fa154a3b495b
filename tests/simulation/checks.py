"""Compares the owner's ledger, its pages and the allocator's pool, each as a whole, while no message is in flight."""

from __future__ import annotations

from collections.abc import Sequence

from quire.hashing import DIGEST_BYTES
from quire.session.block_report import report_chunks, report_end
from quire.session.ledger import Ledger
from quire.session.owner import PoolOwner
from quire_allocator.core.groups.full import FullAttentionManager
from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import index, invariants
from quire_allocator.session.staged_report import StagedReport
from quire_allocator.wire import translate

from tests.allocator.core.pools import published
from tests.simulation.histories import STATE, History
from tests.simulation.world import LEASE_S, Allocator, ViolationError, Worker

Carried = dict[int, tuple[int, str, int, bytes]]  # block -> (group, namespace, position, digest)


def require(condition: bool, message: str) -> None:
    """Raises ViolationError unless the condition holds."""
    if not condition:
        raise ViolationError(message)


def compare(worker: Worker, allocator: Allocator) -> None:
    """Compares everything that both sides know, and the contents of the pages."""
    link, owner = worker.link, worker.owner
    assert link is not None
    held = link.machine.owner
    require(held is not None and held.stream is link.machine, "our stream is not the pool's current one")
    assert held is not None
    require(allocator.directory.pool(held.name) is held, "our stream serves a pool that is not in force")
    require(held.session_id == owner.session_id, "another session than ours is in force")
    require(owner.unanswered_count == 0, "a step was lost: nothing is under way, and it has no answer")
    require(held.steps.next_step == owner.last_step + 1, "steps were applied twice, or not at all")
    compare_pool(held.pool, owner.ledger, is_told=not held.untold_drops)
    if not held.untold_drops:
        check_view(held.pool, worker)
    check_pages(held.pool, worker.history, owner.ledger)
    check_order(held, owner)


def compare_pool(pool: Pool, ledger: Ledger, *, is_told: bool = True) -> None:
    """Compares sequences, tables, and publications."""
    try:
        invariants.check(pool)
    except AssertionError as error:
        raise ViolationError(f"invariant: {error}") from error
    require(list(pool.sequences) == list(ledger.sequences), "other sequences live than the owner has")
    require(pool.last_sequence_id == ledger.last_sequence_id, "ids do not go on where they ended")
    for sequence_id, known in ledger.sequences.items():
        sequence = pool.sequences[sequence_id]
        counts = (sequence.token_count, sequence.committed_token_count, sequence.namespace.name, sequence.priority)
        ours = (known.token_count, known.committed_token_count, known.namespace, known.priority)
        require(counts == ours, f"sequence {sequence_id}: {counts} there, {ours} here")
        require(list(pool.tables(sequence)) == known.tables, f"sequence {sequence_id} has another table")
        require(sequence.turn.token_counts == known.stops, f"sequence {sequence_id} has other stops")
        prompt = known.prompt_token_count if known.prompt_token_count > known.chunk_token_count else 0
        require(sequence.prompt_token_count == prompt, f"sequence {sequence_id} has another prompt to come")
    carried, held = carried_by(pool), ledger.held_blocks()
    require(pool.blocks.free_count == pool.spec.block_count - len(held), "free blocks are not those that nobody holds")
    empty, here = set(pool.blocks.empty), ledger.pages.carried()
    for block, what in carried.items():
        mine = here.get(block)
        require(
            mine is not None and (mine.group, mine.namespace, mine.position, mine.digest) == what,
            f"block {block} is published there as what it does not carry here",
        )
    # The owner knows the empty blocks only if a quota limits the cache.
    is_told = is_told and pool.admission.limits_cache
    for block in here:
        is_known = block in carried or (block in empty and not is_told)
        require(is_known, f"block {block} carries a digest here, and is something else there")


def check_view(pool: Pool, worker: Worker) -> None:
    """Checks that drops took effect, and that the answers reported every removal from the index."""
    view, ledger = worker.view, worker.owner.ledger
    held = ledger.held_blocks()
    mine = {(what.group, what.namespace, what.digest) for b, what in ledger.pages.carried().items() if b not in held}
    require(not view.dropped & mine, "the owner would report what was dropped")
    there = {(group, name, digest) for group, name, _, digest in carried_by(pool).values() if view.follows(group)}
    require(view.keys is None or view.keys == there, "the owner knows of another index than there is")
    view.keys = there


def carried_by(pool: Pool) -> Carried:
    """Returns the publication of every published block of a pool."""
    carried: Carried = {}
    for space in pool.blocks.namespaces.values():
        for manager, scope in zip(pool.managers, space.scopes, strict=True):
            entries: list[tuple[int, bytes, Sequence[int]]] = []
            if isinstance(manager, FullAttentionManager):
                width = manager.width
                for run in manager.tree.runs(scope.root):  # type: ignore[attr-defined]
                    for offset in range(len(run.digests) // DIGEST_BYTES):
                        digest = bytes(run.digests[offset * DIGEST_BYTES : (offset + 1) * DIGEST_BYTES])
                        own = run.blocks[offset * width : (offset + 1) * width]
                        entries.append((run.first_position + offset, digest, own))
            else:
                entries += [(*key, blocks) for key, (blocks, _) in published(scope).items()]
            for position, digest, blocks in entries:
                for group, block in zip(manager.groups, blocks, strict=True):
                    carried[block] = (group, space.name, position, digest)
    return carried


def check_pages(pool: Pool, history: History, ledger: Ledger) -> None:
    """Checks that live sequences read back their own tokens, and published blocks the tokens of their digests."""
    try:
        history.check(ledger)
    except AssertionError as error:
        raise ViolationError(f"pages: {error}") from error
    for block, (group, _, position, digest) in carried_by(pool).items():
        spec = history.spec.groups[group]
        tokens = history.known[digest]
        if spec.kind == STATE:
            require(history.device.states.get(block) == tokens, f"state {block} is not that of its digest")
            continue
        size = spec.block_size
        require(len(tokens) == (position + 1) * size, f"block {block} is published at another position")
        for slot in range(size):
            seen = history.device.slots.get((block, slot))
            require(seen == tokens[position * size + slot], f"block {block} is not what its digest says")


def check_order(held: Ownership, owner: PoolOwner) -> None:
    """Checks that a pool rebuilt from the owner's report would evict in the same order as the present pool."""
    staged = StagedReport(held.spec)
    chunks = report_chunks(owner.ledger)
    for chunk in chunks:
        staged.add(chunk)
    ids = owner.ledger.last_sequence_id
    again = staged.finish(report_end(chunks, last_step=owner.last_step, last_sequence_id=ids))
    there = cached_order(held.pool)
    rebuilt = [what for what in cached_order(again) if what in set(there)]
    require(rebuilt == there, "a rebuilt pool would evict in another order")


def cached_order(pool: Pool) -> list[tuple[int, str, int, bytes]]:
    """Returns the cached blocks in order of eviction, for the policy "lru"."""
    carried = carried_by(pool)
    entries = []
    for space in pool.blocks.namespaces.values():
        for manager, scope in zip(pool.managers, space.scopes, strict=True):
            if isinstance(manager, FullAttentionManager):
                runs = manager.tree.runs(scope.root)  # type: ignore[attr-defined]
                entries += [(run.released, list(reversed(run.blocks))) for run in runs if not run.live]
            else:
                units = scope.units()  # type: ignore[attr-defined]
                entries += [(unit.released, list(reversed(unit.blocks))) for unit in units if not unit.live]
                # The deeper part of a cut stretch is evicted first.
                stretches = getattr(scope, "stretches", {}).values()
                deepest_first = sorted(stretches, key=lambda stretch: -stretch.first_position)
                entries += [(stretch.released, list(reversed(stretch.blocks))) for stretch in deepest_first]
    return [carried[block] for _, blocks in sorted(entries, key=lambda entry: entry[0]) for block in blocks]


def check_all_taken_over(worker: Worker) -> None:
    """Checks right after a report that every block can be hit if all its ancestors are present."""
    link, ledger = worker.link, worker.owner.ledger
    assert link is not None
    assert link.machine.owner is not None
    pool = link.machine.owner.pool
    if link.machine.owner.untold_drops:
        return
    carried = set(carried_by(pool).values())
    keys = {(b.group, b.namespace, b.position, b.digest): b for b in ledger.pages.carried().values()}
    alike = [[n for n, g in enumerate(ledger.groups) if g == group] for group in ledger.groups]
    for key, block in keys.items():
        if translate.pool_spec(worker.owner.spec).groups[block.group].kind.name != "FULL_ATTENTION":
            is_whole = all((other, *key[1:]) in keys for other in alike[block.group])
        else:
            is_whole, at = True, key
            while is_whole:
                is_whole = all((other, *at[1:]) in keys for other in alike[block.group])
                if not is_whole or not at[2]:
                    break
                at = (at[0], at[1], at[2] - 1, keys[at].parent)
                is_whole = at in keys
        require(key in carried or not is_whole, f"position {block.position} was reported and cannot be hit")


def check_expiries(allocator: Allocator, now: float) -> None:
    """Checks that the allocator dropped no pool if it had heard the owner within a lease."""
    for owner in allocator.observer.expired_pools:
        heard = allocator.heard.get(id(owner), now)
        require(now - heard >= LEASE_S, f"a pool was dropped {now - heard:.1f} s after its owner was heard")
    allocator.observer.expired_pools.clear()
    for _, error in allocator.observer.quarantined_pools:
        raise ViolationError(f"a pool was quarantined: {error!r}") from error


def check_leases(allocator: Allocator, now: float) -> None:
    """Checks that no expired lease is left after the allocator has checked leases."""
    for owner in allocator.directory._owners.values():
        require(owner.lease_end > now, "a lease has ended, and the pool is still there")


def check_events(worker: Worker, allocator: Allocator) -> None:
    """Checks that no event reveals a step before its owner has acknowledged the answer."""
    link = worker.link
    if link is None or link.machine.owner is None or link.machine.owner.session_id != worker.owner.session_id:
        return
    pool = link.machine.owner.pool
    kept = pool.log._kept
    if kept:
        require(kept[-1][0] <= worker.owner.last_step, "watchers are told of a step that may still be undone")
    if pool.log._recorded:
        known = {(block.namespace, block.digest) for block in worker.owner.ledger.pages.carried().values()}
        for stretch in index.walk_acknowledged(pool):
            for offset in range(0, len(stretch.digests), DIGEST_BYTES):
                digest = stretch.digests[offset : offset + DIGEST_BYTES]
                require((stretch.namespace, digest) in known, "others are told what hits by a step that may be undone")
