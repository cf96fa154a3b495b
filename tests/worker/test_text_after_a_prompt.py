"""An answer's text is the text of prompt and answer without the prompt's: streamed, whole, and in bytes."""

from __future__ import annotations

import codecs
import random
from pathlib import Path

import pytest
from quire_worker.model.spelling import Spelling
from quire_worker.model.tokenizer import Tokenizer
from tokenizers import Tokenizer as Backend

from tests.worker.built_tokenizers import BYTES, KINDS, OF_TEXTS_AND_BYTES, built


def pieces_of(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> list[str]:
    stream = tokenizer.new_stream(prompt)
    return [*(stream.push([token]) for token in answer), stream.flush()]


def decoded(backend: Backend, tokens: list[int], *, keeps_special: bool = False) -> str:
    """Returns the library's text. It panics where `Strip` finds no character."""
    special = {number for number, each in backend.get_added_tokens_decoder().items() if each.special}
    has_text = any(keeps_special or token not in special for token in tokens)
    return backend.decode(tokens, skip_special_tokens=not keeps_special) if has_text else ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_what_decoding_prompt_and_answer_together_adds(kind: str, tmp_path: Path) -> None:
    tokenizer, backend = built(kind, tmp_path)
    dice = random.Random(kind)
    raw = {backend.token_to_id(piece) for piece in BYTES} if not kind.startswith("byte_level") else set(range(256))
    whole = [token for token in range(backend.get_vocab_size()) if token not in raw]
    for _ in range(300):
        prompt = dice.choices(whole, k=dice.randrange(6))
        answer = dice.choices(whole, k=dice.randrange(1, 8))
        before, together = decoded(backend, prompt), decoded(backend, prompt + answer)
        assert together.startswith(before)
        assert "".join(pieces_of(tokenizer, prompt, answer)) == together[len(before) :], (prompt, answer)
        at_once = tokenizer.new_stream(prompt)
        assert at_once.push(answer) + at_once.flush() == together[len(before) :]


@pytest.mark.parametrize("keeps_special", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_an_answers_tokens_are_its_text(kind: str, keeps_special: bool, tmp_path: Path) -> None:
    tokenizer, backend = built(kind, tmp_path)
    raw = set[int]()
    # The tokenizers library decodes this text. Beside a broken byte, the library drops valid bytes, too.
    if kind == "bytes_before_spaces":
        raw = {backend.token_to_id(piece) for piece in BYTES}
    tokens = [token for token in range(backend.get_vocab_size()) if token not in raw]
    special = tokenizer.special_ids
    dice = random.Random(kind)
    for _ in range(300):
        prompt, answer = dice.choices(tokens, k=dice.randrange(5)), dice.choices(tokens, k=dice.randrange(1, 7))
        answer += dice.choices([answer[-1], *special], k=2)
        stream = tokenizer.new_stream(prompt, keeps_special=keeps_special)
        text = "".join([stream.push([token]) for token in answer]) + stream.flush()
        places = [len(prompt) + index for index in range(len(answer))]
        spelled = tokenizer.spell_in_text(answer, prompt + answer, places, keeps_special=keeps_special)
        before = tokenizer.spell_in_text(prompt, prompt, [*range(len(prompt))], keeps_special=keeps_special)
        whole = codecs.getincrementaldecoder("utf-8")("replace")
        hidden = () if keeps_special else special
        whole.decode(b"".join([each for token, each in zip(prompt, before, strict=True) if token not in hidden]))
        shown = [each for token, each in zip(answer, spelled, strict=True) if token not in hidden]
        assert whole.decode(b"".join(shown), True) == text, (prompt, answer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_other_tokens_are_what_the_text_would_have(kind: str, tmp_path: Path) -> None:
    tokenizer, backend = built(kind, tmp_path)
    prompt = backend.encode("the hello").ids
    for text in ([], prompt):
        for token in {*backend.encode("the hello for").ids, *prompt}:
            (spelled,) = tokenizer.spell_in_text([token], text, [len(text)])
            assert spelled.decode() == "".join(pieces_of(tokenizer, text, [token]))


@pytest.mark.parametrize("kind", [*KINDS, *OF_TEXTS_AND_BYTES])
def test_a_text_is_the_same_in_whatever_parts_its_tokens_come(kind: str, tmp_path: Path) -> None:
    """The outbox decodes many tokens at once if nobody has taken the text for a while. Some are broken bytes."""
    tokenizer, backend = built(kind, tmp_path)
    dice = random.Random(kind)
    tokens = [backend.token_to_id(piece) for piece in BYTES if backend.token_to_id(piece) is not None]
    tokens += [*range(backend.get_vocab_size())]
    for _ in range(300):
        prompt, answer = dice.choices(tokens, k=dice.randrange(4)), dice.choices(tokens, k=dice.randrange(1, 9))
        cut = dice.randrange(len(answer))
        in_two = tokenizer.new_stream(prompt)
        text = in_two.push(answer[:cut]) + in_two.push(answer[cut:]) + in_two.flush()
        assert text == "".join(pieces_of(tokenizer, prompt, answer)), (prompt, answer)


def test_bytes_that_no_neighbor_changes_are_settled(tmp_path: Path) -> None:
    for kind, at_start, behind in (
        ("byte_level", True, True),
        ("llama_2", False, True),
        ("word_piece", False, True),
        ("word_ends", False, False),
        ("ctc", False, False),
    ):
        tokenizer, backend = built(kind, tmp_path / kind)
        start, hello = backend.token_to_id("<s>"), backend.encode("hello").ids
        assert tokenizer.is_settled([]) is tokenizer.is_settled([start]) is at_start, kind
        assert tokenizer.is_settled([start, *hello]) is behind, kind


def test_an_answer_keeps_the_space_of_its_first_token_and_an_answer_to_nothing_does_not(tmp_path: Path) -> None:
    tokenizer, backend = built("llama_2", tmp_path)
    hello, the, start = map(backend.token_to_id, ("▁hello", "▁the", "<s>"))
    assert pieces_of(tokenizer, [start, the], [hello, hello]) == [" hello", " hello", ""]
    assert pieces_of(tokenizer, [start], [hello, hello]) == ["hello", " hello", ""]


@pytest.mark.parametrize("kind", ["llama_2", "gemma", "metaspace_with_bytes", "byte_level"])
def test_characters_of_several_tokens_come_whole_also_where_the_prompt_ends_inside_one(
    kind: str, tmp_path: Path
) -> None:
    tokenizer, _ = built(kind, tmp_path)
    tokens = byte_tokens(kind, tokenizer, "漢😀".encode())
    assert pieces_of(tokenizer, [], tokens) == ["", "", "漢", "", "", "", "😀", ""]
    assert pieces_of(tokenizer, tokens[:2], tokens[2:]) == ["漢", "", "", "", "😀", ""]
    assert pieces_of(tokenizer, tokens, tokens[:2]) == ["", "", "\ufffd"]


@pytest.mark.parametrize("kind", ["llama_2", "gemma", "metaspace_with_bytes", "byte_level"])
def test_bytes_that_are_no_character_come_at_once(kind: str, tmp_path: Path) -> None:
    tokenizer, _ = built(kind, tmp_path)
    tokens = byte_tokens(kind, tokenizer, b"\x80" * 50 + b"\xff")
    assert pieces_of(tokenizer, [], tokens) == ["\ufffd"] * 51 + [""]


def test_random_bytes_are_what_the_library_makes_of_them(tmp_path: Path) -> None:
    tokenizer, backend = built("byte_level", tmp_path)
    dice = random.Random(7)
    for _ in range(300):
        data = bytes(dice.choices([*range(256), *[0xE2, 0x98, 0x83, 0xED, 0xA0, 0xF0, 0x9F] * 8], k=12))
        tokens = byte_tokens("byte_level", tokenizer, data)
        assert "".join(pieces_of(tokenizer, [], tokens)) == backend.decode(tokens) == data.decode(errors="replace")


def test_a_push_looks_at_its_own_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = built("byte_level", tmp_path)
    tokens = byte_tokens("byte_level", tokenizer, b"\x80") * 1_000
    spelled: list[int] = []
    spell = Spelling.spell
    monkeypatch.setattr(Spelling, "spell", lambda self, token: spelled.append(token) or spell(self, token))
    pieces_of(tokenizer, [], tokens)
    assert len(spelled) <= 1_001


def test_a_decoder_that_looks_further_holds_back_a_few_tokens_at_most(tmp_path: Path) -> None:
    tokenizer, backend = built("word_ends", tmp_path)
    word = backend.token_to_id("hello</w>")
    assert pieces_of(tokenizer, [word], [word] * 3) == [" hello"] * 3 + [""]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_echoed_are_written_as_the_library_decodes_them(kind: str, tmp_path: Path) -> None:
    tokenizer, backend = built(kind, tmp_path)
    dice = random.Random(kind)
    special = [backend.token_to_id(each) for each in ("<s>", "</s>", "<|user|>")]
    ordinary = [*backend.encode("the hello").ids, *backend.encode("for").ids]
    for _ in range(100):
        tokens = [*dice.choices(special, k=dice.randrange(2)), *dice.choices(ordinary, k=4)]
        if not kind.startswith("word") and kind != "no_decoder":
            tokens += dice.choices(special + ordinary, k=4)
        assert tokenizer.written([*tokens, 1 << 20]) == backend.decode(tokens, skip_special_tokens=False)
    assert tokenizer.written([]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_kept_are_in_the_text_wherever_they_come(kind: str, tmp_path: Path) -> None:
    tokenizer, backend = built(kind, tmp_path)
    user, words = backend.token_to_id("<|user|>"), backend.encode("the hello").ids
    for prompt, answer in ((words, [user, *words, user]), ([], [user, *words, user]), (words, [user, user])):
        stream = tokenizer.new_stream(prompt, keeps_special=True)
        text = "".join([stream.push([token]) for token in answer]) + stream.flush()
        before, together = (decoded(backend, each, keeps_special=True) for each in (prompt, prompt + answer))
        assert text.replace(" ", "") == together.removeprefix(before).replace(" ", "")
        assert text.count("<|user|>") == (1 if kind == "ctc" and answer == [user, user] else 2)
        at_once = tokenizer.new_stream(prompt, keeps_special=True)
        assert at_once.push(answer) + at_once.flush() == text
        assert "<|user|>" not in "".join(pieces_of(tokenizer, prompt, answer))


def byte_tokens(kind: str, tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_bytes = {tokenizer.spell([token])[0]: token for token in reversed(range(tokenizer.vocab_size))}
    if kind != "byte_level":
        by_bytes = {bytes([byte]): tokenizer.vocabulary()[piece] for byte, piece in enumerate(BYTES)}
    return [by_bytes[bytes([byte])] for byte in data]
