"""Tokenizers with every kind of decoder, small enough to be built in a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_worker.model.tokenizer import Tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["the", "for", "hello", "a", "b", "don't", ".", ",", "play", "e"]


def _with_pieces(pieces: list[str], decoder: Any, *, prepends: bool) -> Backend:
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prepends else replace  # type: ignore[assignment]
    backend.decoder = decoder
    return backend


def _sentencepiece_pieces() -> list[str]:
    words = [f"{SPACE}{word}" for word in WORDS]
    return ["<unk>", "<s>", "</s>", *BYTES, SPACE, SPACE * 2, *words, *WORDS, *"abcdehlortfn'"]


def llama_2() -> Backend:
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _with_pieces(_sentencepiece_pieces(), decoders.Sequence(parts), prepends=True)


def gemma() -> Backend:
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return _with_pieces(_sentencepiece_pieces(), decoders.Sequence(parts), prepends=False)


def metaspace() -> Backend:
    pieces = [piece for piece in _sentencepiece_pieces() if piece not in BYTES]
    return _with_pieces(pieces, decoders.Metaspace(prepend_scheme="always"), prepends=True)


def metaspace_with_bytes() -> Backend:
    parts = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    return _with_pieces(_sentencepiece_pieces(), decoders.Sequence(parts), prepends=True)


def unigram() -> Backend:
    pieces = [piece for piece in dict.fromkeys(_sentencepiece_pieces()) if piece not in BYTES]
    backend = Backend(models.Unigram([(piece, -float(len(pieces))) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    backend.decoder = decoders.Metaspace()  # type: ignore[assignment]
    return backend


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    backend.add_tokens([AddedToken("<think> ", special=False), AddedToken("é", special=False)])
    return backend


def word_piece() -> Backend:
    pieces = ["[UNK]", "<s>", "</s>", *WORDS, *(f"##{word}" for word in WORDS), "##", "n't"]
    backend = Backend(models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)  # type: ignore[assignment]
    return backend


def word_ends() -> Backend:
    pieces = ["<unk>", "<s>", "</s>", *(f"{word}</w>" for word in WORDS), *WORDS]
    backend = Backend(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")  # type: ignore[assignment]
    return backend


def no_decoder() -> Backend:
    backend = Backend(
        models.WordLevel({"[UNK]": 0, "<s>": 1, "</s>": 2} | {w: n + 3 for n, w in enumerate(WORDS)}, "[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return backend


def word_piece_as_it_is() -> Backend:
    backend = word_piece()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # type: ignore[assignment]
    return backend


def bytes_before_spaces() -> Backend:
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0)]
    return _with_pieces(_sentencepiece_pieces(), decoders.Sequence(parts), prepends=True)


def metaspace_inside() -> Backend:
    parts = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    return _with_pieces(_sentencepiece_pieces(), decoders.Sequence(parts), prepends=False)


def byte_level_fused() -> Backend:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])  # type: ignore[assignment]
    return backend


def ctc() -> Backend:
    pieces = ["<pad>", "<unk>", "<s>", "</s>", "|", *WORDS]
    backend = Backend(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    backend.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=False)  # type: ignore[assignment]
    return backend


def spaces_after_fusing() -> Backend:
    parts = [decoders.Fuse(), decoders.Replace(SPACE, " ")]
    pieces = [piece for piece in _sentencepiece_pieces() if piece not in BYTES]
    return _with_pieces(pieces, decoders.Sequence(parts), prepends=False)


def stripped_at_its_end() -> Backend:
    parts = [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
    pieces = [piece for piece in _sentencepiece_pieces() if piece not in BYTES]
    return _with_pieces(pieces, decoders.Sequence(parts), prepends=True)


def stripped_word_by_word() -> Backend:
    parts = [decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0), decoders.Fuse()]
    pieces = [piece for piece in _sentencepiece_pieces() if piece not in BYTES]
    return _with_pieces(pieces, decoders.Sequence(parts), prepends=True)


def byte_level_stripped() -> Backend:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])  # type: ignore[assignment]
    return backend


def word_ends_in_a_sequence() -> Backend:
    backend = word_ends()
    parts = [decoders.BPEDecoder(suffix="</w>"), decoders.Fuse(), decoders.Replace(" ,", ",")]
    backend.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    return backend


def bytes_before_single_spaces() -> Backend:
    spaces = decoders.Replace(Regex(" +"), " ")
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), spaces]
    return _with_pieces(_sentencepiece_pieces(), decoders.Sequence(parts), prepends=False)


def byte_level_with_other_words() -> Backend:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("hello", "HELLO")])  # type: ignore[assignment]
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "llama_2": llama_2, "gemma": gemma, "metaspace": metaspace, "metaspace_with_bytes": metaspace_with_bytes,
    "unigram": unigram, "byte_level": byte_level, "word_piece": word_piece, "word_ends": word_ends,
    "no_decoder": no_decoder, "word_piece_as_it_is": word_piece_as_it_is, "bytes_before_spaces": bytes_before_spaces,
    "metaspace_inside": metaspace_inside, "byte_level_fused": byte_level_fused, "ctc": ctc,
    "spaces_after_fusing": spaces_after_fusing, "stripped_at_its_end": stripped_at_its_end,
    "stripped_word_by_word": stripped_word_by_word, "byte_level_stripped": byte_level_stripped,
    "word_ends_in_a_sequence": word_ends_in_a_sequence,
}  # fmt: skip


# Decoders that change texts of several tokens and also decode byte tokens.
OF_TEXTS_AND_BYTES = {
    "bytes_before_single_spaces": bytes_before_single_spaces,
    "byte_level_with_other_words": byte_level_with_other_words,
}


def built(kind: str, folder: Path) -> tuple[Tokenizer, Backend]:
    """Returns the tokenizer that a worker loads from a folder, and the tokenizers library's object."""
    backend = (KINDS | OF_TEXTS_AND_BYTES)[kind]()
    backend.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "</s>", "<|user|>")])
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=backend).save_pretrained(folder)
    return Tokenizer(folder), backend
