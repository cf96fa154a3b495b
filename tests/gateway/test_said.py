"""Which prompts continue what was said: those of its conversation, and no text that looks like it. Pure."""

from __future__ import annotations

from quire_gateway.continuing import Said, common_count, continued

TURN, TURN_AS_TEXT, A, B, AB = range(5)  # a special token, an ordinary one of the same text, and texts
SPELLED = {TURN: b"<turn>", TURN_AS_TEXT: b"<turn>", A: b"a", B: b"b", AB: b"ab"}


def test_an_answer_keeps_its_tokens_where_a_tokenizer_would_take_others() -> None:
    said = Said("m", (TURN, A, TURN, A, B), 3)
    prompt = (TURN, A, TURN, AB, TURN, B)
    same = common_count(said.tokens, prompt)
    assert said.is_begun_by(same)
    assert continued(said.tokens, prompt, same, SPELLED) == (TURN, A, TURN, A, B, TURN, B)


def test_the_last_token_of_a_prompt_may_be_one_with_the_first_of_its_answer() -> None:
    said = Said("m", (TURN, A, B, A), 2)
    prompt = (TURN, AB, A, B)
    same = common_count(said.tokens, prompt)
    assert said.is_begun_by(same)
    assert continued(said.tokens, prompt, same, SPELLED) == (TURN, A, B, A, B)


def test_a_text_that_spells_special_tokens_is_not_what_was_said() -> None:
    """The conversation has turns, and the prompt one turn whose text looks like them."""
    said = Said("m", (TURN, A, TURN, B, TURN, A), 5)
    prompt = (TURN, A, TURN_AS_TEXT, B, TURN_AS_TEXT, A, TURN, B)
    assert not said.is_begun_by(common_count(said.tokens, prompt))
