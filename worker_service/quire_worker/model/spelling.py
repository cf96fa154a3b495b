"""Bytes of a token in the middle of a text: several tokens may form one character together, and none of them is text
alone.

byte-level     each character of a token's name is a byte: printable ones are themselves, others are shifted
byte fallback  <0xE2> is a byte, and consecutive ones form one or more characters
otherwise      the text that the tokenizer's decoder adds for the token when it follows another token

Some decoders treat the first token of a text in another way: Llama 2's drops its space.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import tokenizers

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character are decoded to
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
# Decoders that look at each token by itself, but for the first one and for bytes. What another one adds with a token
# depends on more than the token: CTC drops repeated ones, BPEDecoder ends words when the next token comes.
_SEPARATE: Final = frozenset({"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})


def byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for, as GPT-2 defined it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + shift): byte for shift, byte in enumerate(others)}


class Spelling:
    """Spells the tokens of one tokenizer. Each token is looked up once and kept.

    Attributes:
        is_separate: whether a text is its tokens' bytes, one after another, but for how its first token begins.
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
        self.is_separate = kinds <= {"ByteLevel", "Fuse"} if "ByteLevel" in kinds else _are_separate(parts)
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._has_bytes = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}
        self._anchor: tuple[int, str] | None = None

    def spell(self, token_id: int) -> bytes:
        """Returns the bytes of a token, also of a special one; none of an id that is no token."""
        found = self._known.get(token_id)
        if found is None:
            name = self._backend.id_to_token(token_id)
            if name is None:
                return b""  # and is not kept: callers can name four billion of them
            found = self._known[token_id] = self._special.get(token_id) or self._spelled(token_id, name)
        return found

    def spell_first(self, token_id: int) -> bytes:
        """Returns the bytes of a token that a text begins with."""
        name = self._backend.id_to_token(token_id)
        if name is None or self._alphabet is not None:
            return self.spell(token_id)
        text = self._backend.decode([token_id], skip_special_tokens=False)
        is_part = text == REPLACEMENT and self._has_bytes  # of a character
        return self.spell(token_id) if is_part else text.encode()

    def _spelled(self, token_id: int, name: str) -> bytes:
        if self._alphabet is not None:
            if all(character in self._alphabet for character in name):
                return bytes(self._alphabet[character] for character in name)
            return name.encode()  # as the decoder has it: an added token stands for itself
        byte = _BYTE.fullmatch(name) if self._has_bytes else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        anchor, before = self._anchored()
        together = self._backend.decode([anchor, token_id], skip_special_tokens=False)
        if not together.startswith(before):
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        return together[len(before) :].encode()

    def _anchored(self) -> tuple[int, str]:
        """Returns an ordinary token and its text, behind which others are decoded."""
        if self._anchor is None:
            ordinary = (
                number
                for name, number in sorted(self._backend.get_vocab(with_added_tokens=False).items())
                if name.isascii() and name.isalnum()
            )
            number = next(ordinary, 0)
            self._anchor = number, self._backend.decode([number], skip_special_tokens=False)
        return self._anchor


def _decoder_parts(description: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the decoders that are applied, in their order, wherever they stand."""
    if description.get("type") == "Sequence":
        return [part for each in description.get("decoders", ()) for part in _decoder_parts(each)]
    return [description]


def _are_separate(parts: list[dict[str, Any]]) -> bool:
    """Returns whether decoders look at each token by itself, but for the first one and for bytes."""
    is_fused = False
    for part in parts:
        kind = part.get("type")
        if kind not in _SEPARATE or (is_fused and kind not in {"Fuse", "Strip"}):
            return False
        if kind == "Strip" and (part.get("stop") or (is_fused and part.get("start", 0) > 1)):
            return False  # it depends on the end of the text, or on more than its first character
        is_fused = is_fused or kind == "Fuse"
    return True
