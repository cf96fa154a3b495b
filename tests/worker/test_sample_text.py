"""Stop texts, for every split of a text into tokens: no part of a stop text is sent, and nothing else is held back."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from quire_worker.model.sample_text import SampleText, StopTexts
from quire_worker.model.tokenizer import Tokenizer


def first_stop(text: str, stops: list[str]) -> str | None:
    """Returns the text before the stop text that completes first, checked character by character.

    If several complete at once, the longest counts.
    """
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


def splits(text: str) -> list[list[str]]:
    """Returns every way to cut a text into pieces."""
    cuts = itertools.product((False, True), repeat=len(text) - 1)
    found = []
    for cut in cuts:
        pieces, start = [], 0
        for place, is_cut in enumerate(cut, start=1):
            if is_cut:
                pieces.append(text[start:place])
                start = place
        found.append([*pieces, text[start:]])
    return found


def streamed(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """Streams the pieces, and returns the text and whether a stop text was found."""
    finder, out = StopTexts(stops), ""
    for piece in pieces:
        ready, is_found = finder.push(piece)
        out += ready
        if is_found:
            return out, True
    return out + finder.flush(), False


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("abcabcabd", ["abd"]),
        ("aaaaab", ["aab"]),
        ("xyzzyxy", ["zzy", "zy"]),
        ("one\n\ntwo", ["\n\n", "\ntwo"]),
        ("ends a", ["ab"]),
        ("abcdef", ["cd", "bcd", "bcde"]),
        ("aXbXc", ["X"]),
    ],
)
def test_every_split_gives_the_text_before_the_first_stop_text(text: str, stops: list[str]) -> None:
    expected = first_stop(text, stops)
    for pieces in splits(text):
        assert streamed(pieces, stops) == ((text, False) if expected is None else (expected, True))


def test_random_texts_and_stops_agree_with_looking_character_by_character() -> None:
    dice = random.Random(3)
    for _ in range(3000):
        text = "".join(dice.choices("ab", k=dice.randrange(1, 25)))
        stops = ["".join(dice.choices("ab", k=dice.randrange(1, 6))) for _ in range(dice.randrange(1, 4))]
        pieces, start = [], 0
        while start < len(text):
            length = dice.randrange(1, 6)
            pieces.append(text[start : start + length])
            start += length
        expected = first_stop(text, stops)
        assert streamed(pieces, stops) == ((text, False) if expected is None else (expected, True))


def test_no_more_is_held_back_than_could_begin_a_stop_text() -> None:
    finder = StopTexts(["STOP", "TOP!"])
    assert finder.push("no reason") == ("no reason", False)
    assert finder.push(" to ST") == (" to ", False)
    assert finder.push("A") == ("STA", False)
    assert finder.push("TO") == ("", False)
    assert finder.flush() == "TO"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path("models/demo"))


def test_text_of_tokens_ends_before_the_stop_text_and_begins_with_the_echo(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("for name in names: print(é)")
    text = SampleText(tokenizer.new_stream(), echo="for: ", stop_texts=["names"])
    out = ""
    for count, token in enumerate(tokens, start=1):
        is_found = text.take(token)
        if count % 2:
            out += text.push([])
        if is_found:
            break
    assert out + text.push([]) + text.flush() == "for: for name in "


def test_stop_texts_do_not_count_before_so_many_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("in in in in in")
    text = SampleText(tokenizer.new_stream(), stop_texts=["in"], min_tokens=3)
    taken = list(itertools.takewhile(lambda token: not text.take(token), tokens))
    assert len(taken) >= 2
    whole = text.push([]) + text.flush()
    assert whole.endswith("in ")
    assert tokenizer.decode(tokens).startswith(whole)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_text_that_names_a_special_token_ends_at_the_token_and_at_the_text(
    tokenizer: Tokenizer, cut: int
) -> None:
    (end,) = tokenizer.encode("<|end|>")
    written = [token for piece in ("<", "|", "end", "|", ">") for token in tokenizer.encode(piece)]
    before, after = tokenizer.encode("for é"), tokenizer.encode("\n in")
    for stop, special, out in (
        ("<|end|>", [end], "for é"),
        ("<|end|>", written, "for é"),
        ("é<|end|>", [end], "for "),
        ("<|end|>\n", [end], "for é"),
        ("<|end|><|end|>", [end, end], "for é"),
        ("<|end|><|end|>", [end], "for é\n in"),
        ("x<|end|>", [end], "for é\n in"),
        ("<|end|>é", [end], "for é\n in"),
    ):
        text = SampleText(tokenizer.new_stream(), stop_texts=[stop, "never"])
        said = ""
        for count, token in enumerate([*before, *special, *after], start=1):
            is_found = text.take(token)
            if count % cut == 0:
                said += text.push([])
            if is_found:
                break
        assert said + text.push([]) + text.flush() == out


def test_a_stop_text_that_is_a_special_token_is_found_where_these_are_kept(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode("<|end|>")
    text = SampleText(tokenizer.new_stream(keeps_special=True), stop_texts=["<|end|>\n"])
    tokens = [*tokenizer.encode("for"), end, *tokenizer.encode("x"), end, *tokenizer.encode("\n in")]
    taken = list(itertools.takewhile(lambda token: not text.take(token), tokens))
    assert text.push([]) + text.flush() == "for<|end|>x"
    assert len(taken) < len(tokens)
