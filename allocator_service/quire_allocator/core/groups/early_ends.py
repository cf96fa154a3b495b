"""Where a long prompt that is new to a pool with states leaves one more of them: an eighth before its end.

A prompt leaves a state at its end. Whoever is the first to ask for the same with another end, as an edited chat or the
second user of a system prompt, parts from it before that, finds none, and computes all of it again; only then is there
a junction. With an early end the first one computes an eighth again.

It costs a pass and room. So a prompt has an early end only where its new part is worth that: where the attention of it
takes at least a quarter of the blocks of a state.

    prompt of 4,096 tokens, blocks of 16, one group of full attention and 24 of states; its last boundary is 4,080
        all is new          255 blocks of attention, 24 of a state: an early end at 3,568, an eighth of 4,080 before
        4,000 were known      5 blocks of attention: none

Once a junction was made between an early end and the boundary behind it, prompts part there: the junction takes the
place of the early end, which is gone (`Retention.make`).

`docs/decisions/0056-early-ends.md` and `0058-junctions-for-early-ends.md` have what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire_allocator.core.boundary import prompt_end
from quire_allocator.core.spec import GroupKind, GroupSpec

_EARLY_PART: Final = 8
_STATE_PART: Final = 4


def early_end(groups: Sequence[GroupSpec], edge_tokens: int, prompt_token_count: int, known_token_count: int) -> int:
    """Returns the early end of a prompt, which is at an edge; 0 where it has none.

    Args:
        groups: of the pool.
        edge_tokens: boundaries are at multiples of this.
        prompt_token_count: of the prompt.
        known_token_count: leading tokens of it that were computed before: matched, or up to the junction.
    """
    end = prompt_end(prompt_token_count, edge_tokens)
    new = end - known_token_count
    attention = sum([new // group.block_size for group in groups if group.kind is GroupKind.FULL_ATTENTION])
    if not attention or _STATE_PART * attention < sum([group.kind is GroupKind.STATE for group in groups]):
        return 0
    early = (end - new // _EARLY_PART) // edge_tokens * edge_tokens
    return early if known_token_count < early < end else 0
