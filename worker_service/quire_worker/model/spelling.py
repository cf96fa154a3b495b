"""Bytes of single tokens: if several tokens form one character, none of these tokens is text alone.

byte-level     each character of a token's name stands for a byte: printable bytes for themselves, others shifted
byte fallback  <0xE2> is a byte, and consecutive bytes form one or more characters
otherwise      the text that the tokenizer's decoder adds for the token when it follows another token

Some decoders treat the first token of a text differently: Llama 2's drops its space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import tokenizers

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"  # decoders write this for bytes that form no character
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
# Decoders that decode each token separately, except for the first token and bytes. In other decoders a token's text
# depends on its neighbors: CTC drops repeated tokens, BPEDecoder ends a word when the next token comes.
_SEPARATE: Final = frozenset({"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})


def byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for, as GPT-2 defined it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + shift): byte for shift, byte in enumerate(others)}


class Spelling:
    """Spells the tokens of one tokenizer. Each token's bytes are computed once and cached.

    Attributes:
        is_separate: whether a text is the concatenation of its tokens' bytes, except for the beginning of its first
            token.
        is_same_at_start: whether a token has the same bytes at the start of a text as later in the text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special = {
            number: token.content.encode()
            for number, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        parts = [] if backend.decoder is None else _decoder_parts(json.loads(backend.decoder.__getstate__()))
        kinds = {str(part.get("type")) for part in parts}
        self.is_separate = _are_separate(parts)
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self.is_same_at_start = self._alphabet is not None and kinds <= {"ByteLevel", "Fuse"}
        self._has_bytes = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}
        self._anchor: tuple[int, str] | None = None

    def spell(self, token_id: int) -> bytes:
        """Returns the bytes of a token, special tokens included; empty for an id that is not a token."""
        found = self._known.get(token_id)
        if found is None:
            name = self._backend.id_to_token(token_id)
            if name is None:
                return b""  # not cached, because callers can name four billion unknown ids
            found = self._known[token_id] = self._special.get(token_id) or self._spelled(token_id, name)
        return found

    def spell_behind(self, before: Sequence[int], token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text.

        Args:
            before: the last tokens of the text that have text; none if the token begins it.
            token_id: the token.
        """
        alone = self.spell(token_id)
        is_first_name = not before and token_id in self._special
        if not alone and self._backend.id_to_token(token_id) is None:
            return alone
        if self.is_same_at_start or (self.is_separate and (before or is_first_name)):
            return alone
        text = self._decoded(before)
        together = self._decoded([*before, token_id])
        is_part = self._is_bytes(token_id) and REPLACEMENT in (together[-1:], text[-1:])
        return alone if is_part else together[len(text) :].encode()

    def _is_bytes(self, token_id: int) -> bool:
        """Returns whether the token stands for bytes, which may be a part of a character."""
        name = self._backend.id_to_token(token_id)
        return self._alphabet is not None or (self._has_bytes and name is not None and bool(_BYTE.fullmatch(name)))

    def _decoded(self, token_ids: Sequence[int]) -> str:
        if not token_ids:  # some decoders of the library panic at an empty text
            return ""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def _spelled(self, token_id: int, name: str) -> bytes:
        if self._alphabet is not None:
            if all(character in self._alphabet for character in name):
                return bytes(self._alphabet[character] for character in name)
            return name.encode()  # as in the decoder, an added token stands for its own name
        byte = _BYTE.fullmatch(name) if self._has_bytes else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        anchor, before = self._anchored()
        together = self._decoded([anchor, token_id])
        if not together.startswith(before):
            return self._decoded([token_id]).encode()
        return together[len(before) :].encode()

    def _anchored(self) -> tuple[int, str]:
        """Returns an ordinary token and its text. Other tokens are decoded behind this token."""
        if self._anchor is None:
            ordinary = (
                number
                for name, number in sorted(self._backend.get_vocab(with_added_tokens=False).items())
                if name.isascii() and name.isalnum()
            )
            number = next(ordinary, 0)
            self._anchor = number, self._decoded([number])
        return self._anchor


def _decoder_parts(description: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns all decoders of a description, in the order of their application."""
    if description.get("type") == "Sequence":
        return [part for each in description.get("decoders", ()) for part in _decoder_parts(each)]
    return [description]


def _are_separate(parts: list[dict[str, Any]]) -> bool:
    """Returns whether decoders decode each token separately, except the first token and bytes."""
    is_fused = bool(parts) and parts[0].get("type") == "ByteLevel"  # this decoder joins all tokens to one text
    for part in parts[is_fused:]:
        kind = part.get("type")
        if kind not in _SEPARATE or (is_fused and kind not in {"Fuse", "Strip"}):
            return False
        if kind == "Strip" and (part.get("stop") or (is_fused and part.get("start", 0) > 1)):
            return False  # the result depends on the end of the text, or on several characters at its start
        is_fused = is_fused or kind == "Fuse"
    return True
