"""Where an answer leaves a state, in a pool with states and full attention: at distances that double.

A prompt leaves a state at its end, and who goes on from its answer would compute that again. How long an answer gets
nobody knows, so while it is computed a state is made one, two, four, ... edges behind the last one of the prompt. Each
takes the place of the one before, and the first one that of the prompt's (`Retention.make`): a turn leaves one state,
as it did, which is now soon before the end of the answer. Who goes on computes half of an answer again at most.

    prompt of 100 tokens, edges every 16; its last boundary is 96
        answer ends                      112, 128, 160, 224, ...
        what an answer of 100 leaves     one state after 160 of 200 tokens

A pool of which most prompts part before the end of those before them has none: there the ends of prompts are worth
more (`Partings.go_on`). A fork has none either, and who was forked makes no more of them: which of several answers is
gone on from, nobody knows.

`docs/decisions/0059-states-of-answers.md` has what was measured.
"""

from __future__ import annotations

from typing import Final

ANSWER_ENDS_MAX: Final = 12  # the last one is 2,048 edges behind the prompt
_TOKENS_MAX: Final = 2**32 - 1  # that a token count can say


def answer_ends(edge_tokens: int, prompt_token_count: int) -> tuple[int, ...]:
    """Returns the token counts at which the answer to a prompt leaves a state, rising."""
    end = (prompt_token_count - 1) // edge_tokens * edge_tokens
    ends = [end + (edge_tokens << doubling) for doubling in range(ANSWER_ENDS_MAX)]
    return tuple([each for each in ends if prompt_token_count < each <= _TOKENS_MAX])
