"""Finds secrets in places where they do not belong, in every form that may reach these places."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence

TEXT_WINDOW = 24  # A part of a text with this many characters identifies the text.
TOKENS_WINDOW = 6  # A part of a list of tokens with this many ids identifies the list.


def forms_of_text(text: str) -> Iterator[str]:
    """Yields every part of a text that gives the text away, raw and as Python and JSON would quote it."""
    for start in range(max(1, len(text) - TEXT_WINDOW + 1)):
        stretch = text[start : start + TEXT_WINDOW]
        yield stretch
        yield repr(stretch)[1:-1]
    yield base64.b64encode(text.encode()).decode().rstrip("=")[:-2]


def forms_of_tokens(tokens: Sequence[int]) -> Iterator[str]:
    """Yields parts of a list of token ids, as lists are printed."""
    for start in range(max(1, len(tokens) - TOKENS_WINDOW + 1)):
        stretch = [str(token) for token in tokens[start : start + TOKENS_WINDOW]]
        yield ", ".join(stretch)
        yield ",".join(stretch)
        yield " ".join(stretch)
        yield "\n".join(f"ids: {token}" for token in stretch)


def forms_of_bytes(data: bytes) -> Iterator[str]:
    """Yields a digest or an id in hexadecimal, in base64, raw, and as Python and protobuf would quote it."""
    yield data.hex()
    yield base64.b64encode(data).decode().rstrip("=")[:-1]
    yield data.decode("latin-1")
    yield repr(data)[2:-1]
    yield "".join(f"\\{byte:03o}" if not 32 <= byte < 127 else chr(byte) for byte in data)


class Canaries:
    """Secrets by name, and a search for them in outputs."""

    def __init__(self) -> None:
        self._forms: dict[str, list[str]] = {}

    def add_text(self, name: str, text: str) -> None:
        """Adds a text such as a prompt, a token or a key."""
        self._forms[name] = list(forms_of_text(text))

    def add_tokens(self, name: str, tokens: Sequence[int]) -> None:
        """Adds a prompt or an answer as token ids."""
        self._forms[name] = list(forms_of_tokens(tokens))

    def add_bytes(self, name: str, data: bytes) -> None:
        """Adds a whole digest, or the id of a session."""
        self._forms[name] = list(forms_of_bytes(data))

    def found_in(self, output: str | bytes) -> list[str]:
        """Returns the names of the secrets that an output gives away."""
        # Text and bytes are compared as Latin-1, because Latin-1 maps every byte to a character.
        text = (output.encode() if isinstance(output, str) else output).decode("latin-1").lower()
        return [name for name, forms in self._forms.items() if any(_wire(form) in text for form in _long(forms))]


def _long(forms: Iterable[str]) -> Iterator[str]:
    return (form for form in forms if len(form) >= 8)


def _wire(form: str) -> str:
    return form.lower() if form.isascii() else form.encode("latin-1", errors="replace").decode("latin-1").lower()
