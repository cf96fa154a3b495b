"""Where an answer leaves a state, in a pool with states and full attention: at distances that double.

A prompt leaves a state at its end, and who goes on from its answer would compute that again. How long an answer gets
nobody knows, so while it is computed a state is made one, two, four, ... edges behind the last one of the prompt. Each
takes the place of the one before, and the first one that of the prompt's (`Retention.make`): a turn leaves one state,
as it did, which is now soon before the end of the answer. Who goes on computes half of an answer again at most.

    prompt of 100 tokens, edges every 16; its last boundary is 96
        answer ends                      112, 128, 160, 224, ...
        what an answer of 100 leaves     one state after 160 of 200 tokens

It takes room that others lose: what is gone on from is copied while the state before it is still cached. So an answer
leaves states only where the attention of its prompt takes at least as many blocks as two states: where states are much
larger than that, few fit, and each that is copied pushes another one out.

A pool of which most prompts part before the end of those before them has none: there the ends of prompts are worth
more (`Partings.go_on`). A fork has none either, and who was forked makes no more of them: which of several answers is
gone on from, nobody knows.

`docs/decisions/0059-states-of-answers.md` has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire_allocator.core.spec import GroupKind, GroupSpec

ANSWER_ENDS_MAX: Final = 12  # the last one is 2,048 edges behind the prompt
_STATES: Final = 2  # as many of them as the attention of a prompt takes blocks for
_TOKENS_MAX: Final = 2**32 - 1  # that a token count can say


def answer_ends(groups: Sequence[GroupSpec], edge_tokens: int, prompt_token_count: int) -> tuple[int, ...]:
    """Returns the token counts at which the answer to a prompt leaves a state, rising; none where it has none.

    Args:
        groups: of the pool.
        edge_tokens: boundaries are at multiples of this.
        prompt_token_count: of the prompt.
    """
    end = (prompt_token_count - 1) // edge_tokens * edge_tokens
    attention = sum([end // group.block_size for group in groups if group.kind is GroupKind.FULL_ATTENTION])
    if attention < _STATES * sum([group.kind is GroupKind.STATE for group in groups]):
        return ()
    ends = [end + (edge_tokens << doubling) for doubling in range(ANSWER_ENDS_MAX)]
    return tuple([each for each in ends if prompt_token_count < each <= _TOKENS_MAX])
