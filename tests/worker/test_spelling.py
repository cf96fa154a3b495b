"""The spelling of single tokens, for tokenizers that write bytes and spaces in different ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from quire_worker.model.conversation import ConversationError, read_conversation
from quire_worker.model.spelling import Spelling
from quire_worker.model.tokenizer import Tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TEXTS = ("The for statement", "naïve \N{SNOWMAN} \N{GRINNING FACE}", "  two spaces\tand a tab\n", "日本語")


def byte_fallback_tokenizer() -> Backend:
    """Builds a tokenizer like SentencePiece's: spaces are U+2581, and unknown characters are bytes."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # type: ignore[assignment]
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        special_tokens=[], initial_alphabet=list("abcdefghijklmnopqrstuvwxyzT"), vocab_size=90
    )
    backend.train_from_iterator(["The for statement and the tab"] * 4, trainer)
    vocabulary = {token: number for number, token in enumerate([*special, *sorted(backend.get_vocab())])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # type: ignore[assignment]
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_all_tokens_are_the_text(text: str) -> None:
    tokenizer = Tokenizer(DEMO)
    assert b"".join(tokenizer.spell(tokenizer.encode(text))).decode() == text
    backend = byte_fallback_tokenizer()
    spelling = Spelling(backend)
    tokens = backend.encode(text).ids
    assert b"".join(map(spelling.spell, tokens)).decode() == backend.decode(tokens) == text


def test_special_tokens_are_spelled_and_ids_that_are_none_are_nothing() -> None:
    tokenizer = Tokenizer(DEMO)
    assert tokenizer.spell([0, 1 << 20]) == [b"<|end|>", b""]


def test_what_decodes_in_another_way_is_asked_of_the_tokenizer() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##")  # type: ignore[assignment]
    assert [Spelling(backend).spell(token) for token in (1, 2)] == [b" play", b"ing"]
    assert Spelling(backend).spell_first(1) == b"play"


def test_a_conversation_is_what_transformers_makes_of_it() -> None:
    messages = '[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]'
    conversation = read_conversation(messages, "", "", with_generation_prompt=True)
    expected = AutoTokenizer.from_pretrained(DEMO).apply_chat_template(
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    tokenizer = Tokenizer(DEMO)
    assert tokenizer.encode_written(tokenizer.chat_template.text(tokenizer.sign(conversation))) == expected


@pytest.mark.parametrize(
    ("messages", "tools", "variables", "message"),
    [
        ("[", "", "", "messages is not JSON"),
        ("[]", "", "", "messages must not be empty"),
        ("[1]", "", "", "messages must be an array of objects"),
        ('[{"content": "x"}]', "", "", r"messages\[0\] has no role"),
        ('[{"role": "user"}]', "{}", "", "tools must be an array of objects"),
        ('[{"role": "user"}]', "", "[]", "variables must be an object"),
        (
            '[{"role": "user"}]',
            "",
            '{"tokenize": true}',
            "variables has 'tokenize', which a request may not set",
        ),
        ("[" * 100_000, "", "", "messages is not JSON"),
    ],
)
def test_what_is_no_conversation_is_refused_in_words(messages: str, tools: str, variables: str, message: str) -> None:
    with pytest.raises(ConversationError, match=message):
        read_conversation(messages, tools, variables, with_generation_prompt=True)


def test_a_template_that_refuses_is_the_callers_error() -> None:
    conversation = read_conversation('[{"role": "user", "content": [1]}]', "", "", with_generation_prompt=True)
    with pytest.raises(ConversationError, match="rejects this conversation: content must be text"):
        Tokenizer(DEMO).chat_template.text(conversation)
