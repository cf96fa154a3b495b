"""What a token is by itself, in bytes: several tokens may be one character together, and none of them text alone.

byte-level     each character of a token's name stands for a byte: printable ones for themselves, others shifted
byte fallback  <0xE2> is a byte, and a lower block stands for a space
otherwise      what the tokenizer decodes it to
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import tokenizers

SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece writes it
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for, as GPT-2 defined it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + shift): byte for shift, byte in enumerate(others)}


class Spelling:
    """Spells the tokens of one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}
        kinds = _decoder_kinds(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else set()
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._has_space = bool(kinds & {"Metaspace", "ByteFallback"})
        self._has_bytes = "ByteFallback" in kinds

    def spell(self, token_id: int) -> bytes:
        """Returns the bytes of a token; none of an id that is no token."""
        name = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._alphabet is not None:
            return bytes(self._alphabet[character] for character in name if character in self._alphabet)
        byte = _BYTE.fullmatch(name) if self._has_bytes else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if self._has_space:
            return name.replace(SPACE, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


def _decoder_kinds(description: dict[str, Any]) -> set[str]:
    """Returns the kinds of decoders that are applied, wherever they stand."""
    kinds = {str(description.get("type"))}
    for part in description.get("decoders", ()):
        kinds |= _decoder_kinds(part)
    return kinds
