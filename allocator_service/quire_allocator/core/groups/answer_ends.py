"""Where an answer leaves a state, in a pool with states and full attention: at distances that grow with it.

A prompt leaves a state at its end, and who goes on from its answer would compute that again. How long an answer gets
nobody knows, so while it is computed a state is made 1, 2, 3, 4, 6, 8, 12, ... edges behind the last one of the prompt:
at powers of two, and halfway between them. Each takes the place of the one before, and the first one that of the
prompt's (`Retention.make`): a turn leaves one state, as it did, which is now soon before the end of the answer. Who
goes on computes a third of an answer again at most.

    prompt of 100 tokens, edges every 16; its last boundary is 96
        answer ends                      112, 128, 144, 160, 192, 224, 288, ...
        what an answer of 100 leaves     one state after 192 of 200 tokens

It takes room that others lose: what is gone on from is copied while the state before it is still cached. So an answer
leaves states only where the attention of its prompt takes at least as many blocks as a state: where states are larger
than that, few fit, and each that is copied pushes another one out.

A pool of which most prompts part before the end of those before them has none: there the ends of prompts are worth
more (`Partings.go_on`). A fork has none either, and who was forked makes no more of them: which of several answers is
gone on from, nobody knows.

`docs/decisions/0059-states-of-answers.md` has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire_allocator.core.boundary import prompt_end
from quire_allocator.core.spec import GroupKind, GroupSpec

ANSWER_ENDS_MAX: Final = 22  # the last one is 2,048 edges behind the prompt
_DISTANCES: Final = tuple(sorted([1, *[2 << each for each in range(11)], *[3 << each for each in range(10)]]))
_TOKENS_MAX: Final = 2**32 - 1  # that a token count can say


def answer_ends(groups: Sequence[GroupSpec], edge_tokens: int, prompt_token_count: int) -> tuple[int, ...]:
    """Returns the token counts at which the answer to a prompt leaves a state, rising; none where it has none.

    Args:
        groups: of the pool.
        edge_tokens: boundaries are at multiples of this.
        prompt_token_count: of the prompt.
    """
    end = prompt_end(prompt_token_count, edge_tokens)
    attention = sum([end // group.block_size for group in groups if group.kind is GroupKind.FULL_ATTENTION])
    if attention < sum([group.kind is GroupKind.STATE for group in groups]):
        return ()
    ends = [end + distance * edge_tokens for distance in _DISTANCES]
    return tuple([each for each in ends if prompt_token_count < each <= _TOKENS_MAX])
