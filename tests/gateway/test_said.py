"""Tests which prompts continue an earlier answer: prompts of the same conversation, and no text that only looks like
it."""

from __future__ import annotations

from quire_gateway.continuing import Said, continued

# TURN is a special token, and TURN_AS_TEXT an ordinary token with the same text. HALF is half a character, and NONE the
# replacement character.
TURN, TURN_AS_TEXT, A, B, AB, HALF, NONE = range(7)
SPELLED = {TURN: b"<turn>", TURN_AS_TEXT: b"<turn>", A: b"a", B: b"b", AB: b"ab", HALF: b"\xc3", NONE: b"\xef\xbf\xbd"}


def of(tokens: tuple[int, ...], prompt_token_count: int) -> Said:
    """Returns an answer to a prompt that continues nothing. `tokens` are the prompt's and the answer's."""
    return Said("m", tokens, prompt_token_count, tokens[:prompt_token_count])


def whole(said: Said, prompt: tuple[int, ...]) -> tuple[int, ...]:
    parting = said.parting(prompt)
    assert parting is not None
    theirs, ours = (
        [SPELLED[token] for token in part] for part in (said.tokens[parting.said :], prompt[parting.prompt :])
    )
    return continued(said.tokens, prompt, parting, theirs, ours)


def test_an_answer_keeps_its_tokens_where_a_tokenizer_would_take_others() -> None:
    said = of((TURN, A, TURN, A, B), 3)
    prompt = (TURN, A, TURN, AB, TURN, B)
    assert whole(said, prompt) == (TURN, A, TURN, A, B, TURN, B)


def test_so_do_all_answers_of_a_longer_conversation() -> None:
    second = (TURN, A, TURN, A, B, TURN, B, TURN)  # the prompt after the first answer
    said = Said("m", (*second, A, B), len(second), (TURN, A, TURN, AB, TURN, B, TURN))
    prompt = (TURN, A, TURN, AB, TURN, B, TURN, AB, TURN, A)
    assert whole(said, prompt) == (*second, A, B, TURN, A)


def test_the_last_token_of_a_prompt_may_be_one_with_the_first_of_its_answer() -> None:
    said = of((TURN, A, B, A), 2)
    prompt = (TURN, AB, A, B)
    assert whole(said, prompt) == (TURN, A, B, A, B)


def test_an_answer_keeps_tokens_that_are_no_text() -> None:
    said = of((TURN, A, TURN, A, HALF, A, B, HALF), 3)
    prompt = (TURN, A, TURN, A, NONE, AB, NONE, TURN, B)
    assert whole(said, prompt) == (*said.tokens, TURN, B)


def test_half_a_character_is_not_what_was_said_where_the_prompt_has_another_text() -> None:
    said = of((TURN, A, TURN, A, HALF, A), 3)
    prompt = (TURN, A, TURN, A, B, TURN)
    assert whole(said, prompt) == prompt


def test_a_text_that_spells_special_tokens_is_not_what_was_said() -> None:
    """The conversation has several turns. The prompt has one turn with a text that spells those turns."""
    said = of((TURN, A, TURN, B, TURN, A), 5)
    prompt = (TURN, A, TURN_AS_TEXT, B, TURN_AS_TEXT, A, TURN, B)
    assert said.parting(prompt) is None
