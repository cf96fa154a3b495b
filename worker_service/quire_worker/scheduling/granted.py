"""Applies the allocator's answer to the samples of a step, and returns the work that it makes possible."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Final

from quire.errors import QuireError, Reason
from quire.protocol.outcomes import GrowOutcome, Result, StepOutcome

from quire_worker.scheduling.passes import pass_ends, pass_token_count, standing
from quire_worker.scheduling.plan import Growing, Plan, Work
from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.roster import Roster

REFUSED: Final = (Result.FORBIDDEN, Result.QUOTA)  # results that end the request with an error; see `refusal_of`


def take_commits(roster: Roster, plan: Plan, outcome: StepOutcome) -> None:
    """Swaps blocks as the allocator says, and drops blocks that fell out of windows.

    Raises:
        AssertionError: the allocator and this worker disagree about which sequences live.
    """
    assert all((*outcome.commits, *outcome.forks)), "the allocator lost a sequence"
    if outcome.swaps:
        by_id = {sample.sequence_id: sample for sample in roster.holders()}
        for swap in outcome.swaps:  # Samples that were freed by this step need no swaps.
            if swap.sequence_id in by_id:
                by_id[swap.sequence_id].swap(swap)
    for commit in plan.commits:
        commit.sample.settle(roster.groups)


def take_grow(roster: Roster, growing: Growing, grown: GrowOutcome) -> bool:
    """Stores the blocks that a sample was granted. Returns False if no block was granted.

    Raises:
        AssertionError: a grow of this worker cannot have that answer.
    """
    sample, _, token_count, entering = growing
    if grown.result in (Result.NO_SPACE, *REFUSED) or not grown.result.is_known:
        return False
    if grown.result is Result.PASS_TOO_LONG:
        sample.pass_token_count_max = max(1, (token_count - sample.computed) // 2)
        return False
    assert grown.result is Result.OK, f"the allocator answered a grow with {grown.result.name}"
    if entering is not None:
        sample.sequence_id = grown.sequence_id
        sample.request.trace.note_sequence(grown.sequence_id)
    if entering is not None and sample.has_ended:  # The sample was cancelled while the allocator's answer was awaited.
        roster.leaving.append(sample)
        return False
    tables, states = grown.blocks[: roster.group_count], grown.blocks[roster.group_count :]
    usage = sample.request.usage
    matched_block_count = grown.matched_token_count // roster.block_size
    if not sample.has_ended:  # The usage of an ended sample does not count these blocks.
        usage.granted_block_count += sum(len(blocks) - matched_block_count for blocks in tables)
    if entering is not None:
        roster.start(sample, entering.passed)
        sample.tables = [array("I", blocks) for blocks in tables]
        sample.computed = sample.committed = grown.matched_token_count
        sample.fallen = [group.first_read(sample.computed) // roster.block_size for group in roster.groups]
        sample.hide(roster.block_size, matched_block_count)
        if roster.has_states:
            sample.states = [own[0] for own in states]
            sample.pass_ends = pass_ends(grown, sample.swapped.end if sample.swapped is not None else 0)
        if sample.swapped is not None and sample.computed >= sample.swapped.end:  # All its swapped tokens were hit.
            roster.swap.release(sample)
        if not sample.request.admitted:
            sample.request.admitted = True
            usage.cached_token_count = grown.matched_token_count
            full_token_count = len(sample.tokens) // roster.block_size * roster.block_size
            if not sample.request.wish.secret:
                usage.cache_write_token_count = max(0, full_token_count - grown.matched_token_count)
            prompt_tokens = len(sample.tokens) - grown.matched_token_count
            roster.shares.charge(sample.request.namespace, prompt_tokens=prompt_tokens)
    else:
        sample.add_blocks(tables, states, token_count // roster.block_size)
    sample.granted = max(token_count, grown.matched_token_count)
    return True


def work_of(plan: Plan, denied: Collection[Sample], under_way: Sequence[Work]) -> list[Work]:
    """Returns the plan's work on samples that have their blocks. This work comes after the work under way."""
    before, work = {item.sample: item for item in under_way}, []
    for sample, token_count in plan.wanted:
        at = standing(sample, before.get(sample))
        if sample not in denied and not sample.has_ended and sample.granted > at.start:
            count = pass_token_count(sample, at, min(token_count, sample.granted - at.start))
            is_restored = sample.is_restored_at(at.start)
            work.append(Work(sample, at.start, count, at.start + count == at.length, is_restored))
    return work


def refusal_of(result: Result) -> QuireError:
    """Returns the error of a request whose blocks the allocator refuses."""
    if result is Result.FORBIDDEN:
        return QuireError.of(Reason.NAMESPACE_FORBIDDEN, "the worker's own certificate does not permit this namespace")
    if result is Result.QUOTA:
        message = "the namespace holds as many blocks as its quota allows: try again when its other requests have ended"
        return QuireError.of(Reason.LIMIT, message)
    message = f"the allocator answered {result.name}, which this worker does not know: update the worker"
    return QuireError.of(Reason.VERSION, message)
