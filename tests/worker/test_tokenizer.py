from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from quire_worker.model.checkpoint import CheckpointError
from quire_worker.model.tokenizer import Tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.worker.tiny_models import END_OF_TEXT, VOCABULARY, write_tokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo"
TEXTS = [
    "",
    "def join(self, iterable):\n    return a string",
    "  leading, trailing and   many spaces  ",
    "Größe, naïve, 漢字, русский, עברית",
    "family 👨‍👩‍👧‍👦, flag 🇺🇳, combining e\u0301",
    "a real replacement character \ufffd in the middle and at the end \ufffd",
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(DEMO)


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = tokenizer.new_stream()
    return [*(stream.push([token]) for token in tokens), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_that_of_transformers_and_decodes_to_the_text(demo: Tokenizer, text: str) -> None:
    tokens = demo.encode(text)
    assert tokens == AutoTokenizer.from_pretrained(DEMO).encode(text)
    assert demo.decode(tokens) == text


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_concatenate_to_the_text(demo: Tokenizer, text: str) -> None:
    assert "".join(streamed(demo, demo.encode(text))) == text


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_random_tokens_concatenate_to_their_decoding(demo: Tokenizer, seed: int) -> None:
    choose = random.Random(seed)
    tokens = [choose.randrange(demo.vocab_size if seed % 2 else 257) for _ in range(200)]
    assert "".join(streamed(demo, tokens)) == demo.decode(tokens)


def test_a_character_spread_over_tokens_comes_whole_with_its_last(demo: Tokenizer) -> None:
    tokens = demo.encode("漢")
    assert len(tokens) == 3
    assert streamed(demo, tokens) == ["", "", "漢", ""]


def test_a_character_that_never_ends_is_flushed_as_a_replacement(demo: Tokenizer) -> None:
    tokens = demo.encode("ok 漢")[:-1]
    pieces = streamed(demo, tokens)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == demo.decode(tokens) == "ok \ufffd"


def test_text_comes_as_soon_as_it_is_certain(demo: Tokenizer) -> None:
    tokens = demo.encode("return a new list")
    assert streamed(demo, tokens) == [*(demo.decode([token]) for token in tokens), ""]


def test_special_tokens_have_no_text_and_do_not_break_a_character(demo: Tokenizer) -> None:
    first, *rest = demo.encode("漢")
    tokens = [0, first, 0, *rest, 0]
    assert "".join(streamed(demo, tokens)) == demo.decode(tokens) == "漢"


def test_ids_outside_the_vocabulary_have_no_text(demo: Tokenizer) -> None:
    tokens = [demo.vocab_size + 5, *demo.encode("list"), demo.vocab_size]
    assert "".join(streamed(demo, tokens)) == demo.decode(tokens) == "list"


def test_the_tiny_tokenizer_has_the_vocabulary_of_the_tiny_models(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.encode(END_OF_TEXT) == [0]
    assert tokenizer.decode(tokenizer.encode("Größe 漢字")) == "Größe 漢字"


def sentencepiece_like(folder: Path) -> Tokenizer:
    """Builds a tokenizer like Llama 2's and Gemma's: spaces are U+2581, bytes <0x..>, a leading space is dropped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=backend).save_pretrained(folder)
    return Tokenizer(folder)


def test_a_tokenizer_that_drops_the_first_space_streams_the_other_spaces(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    tokens = tokenizer.encode("▁a▁▁b▁漢é▁c")
    assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens) == "a  b 漢é c"


def test_a_prompt_is_never_cut_to_a_length_that_the_tokenizer_knows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    limited = Backend.from_file(str(path))
    limited.enable_truncation(4)
    limited.save(str(path))
    assert json.loads(path.read_text())["truncation"] is not None
    assert len(Tokenizer(tmp_path).encode("0123456789")) == 10


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=tmp_path.name):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=tmp_path.name):
        Tokenizer(tmp_path)
