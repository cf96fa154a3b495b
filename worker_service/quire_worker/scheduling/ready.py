"""Plans turns of samples that already have all their blocks, so that the allocator need not be asked.

A turn of this kind can be planned while the previous pass is computed. Only the tokens that this pass samples are not
known yet. Each token has a position after its sample's last token, and the next pass computes the token that is stored
there. If a stop token ended the sample, the next pass computes it once in vain, and the result is dropped a turn later.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_worker.scheduling.drafts import Drafting
from quire_worker.scheduling.passes import is_at_stop, pass_token_count, standing
from quire_worker.scheduling.plan import Plan, Work
from quire_worker.scheduling.room_ahead import last_of
from quire_worker.scheduling.roster import Roster


def ready_after(
    under_way: Sequence[Work],
    roster: Roster,
    drafting: Drafting | None = None,
    *,
    budget: int,
    longest: int,
) -> Plan:
    """Plans a turn after the work under way.

    The plan is not whole if the allocator must be asked for other running samples, or if no sample runs.

    Three kinds of samples are left out. Parents wait for their forks, which share everything that the parents have
    committed. Forks wait for their parent's first token. Samples that may have a draft wait for the token before it.

    Args:
        under_way: the work of the pass that is being computed; empty if there is none.
        roster: the roster of the samples.
        drafting: makes drafts; None without them.
        budget: tokens of the turn's pass.
        longest: the most tokens of a sequence; a sample ends when it has so many.
    """
    plan, work_of = Plan(is_whole=roster.may_go_on), {item.sample: item for item in under_way}
    parents = roster.parents()
    before_backfilled: int | None = None
    for sample in roster.running:
        if sample.passed is not None and before_backfilled is None:
            before_backfilled = budget
        work = work_of.get(sample)
        if work is not None and work.is_complete:
            if sample.has_forks_to_come or (drafting is not None and drafting.may_draft_next(sample)):
                plan.is_whole = False
                continue
            if len(sample.tokens) >= last_of(sample, longest):
                continue  # The text ends with the token that is being sampled.
        at = standing(sample, work)
        token_count = pass_token_count(sample, at, budget)
        is_parted = sample.fork_of is not None or sample in parents
        has_to_ask = is_parted or is_at_stop(sample, at) or sample.is_outgrown_by(at.length)
        if has_to_ask or at.start + token_count > sample.granted:
            plan.is_whole = False
        elif token_count:
            budget -= token_count
            plan.wanted.append((sample, token_count))
    plan.tokens_left = budget if before_backfilled is None else before_backfilled
    return plan
