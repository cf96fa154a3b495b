"""Checkpoints without a tokenizer: their callers send and receive token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from quire_worker.model.checkpoint import has_tokenizer
from quire_worker.model.conversation import ChatTemplate
from quire_worker.model.spelling import Spelling
from quire_worker.model.tokenizer import Tokenizer, TokenizerError


class NoTokenizerError(TokenizerError):
    """The checkpoint has no tokenizer. The message is for callers."""

    def __init__(self) -> None:
        super().__init__("this model comes without a tokenizer: give token ids")


class NoTokenizer(Tokenizer):
    """The substitute if a checkpoint has no tokenizer: prompts are token ids, and tokens have no text.

    Methods that need more raise NoTokenizerError.
    """

    def __init__(self) -> None:
        """Creates an empty tokenizer."""
        self.special, self.special_ids, self._signed = {}, frozenset(), ()
        self.chat_template = ChatTemplate({}, {})
        self._spelling = Spelling(tokenizers.Tokenizer(tokenizers.models.BPE()))

    @property
    def vocab_size(self) -> int:
        return 0

    def to_json(self) -> str:
        raise NoTokenizerError

    def encode(self, text: str) -> list[int]:
        raise NoTokenizerError

    def encode_continuation(self, text: str) -> list[int]:
        raise NoTokenizerError

    def surrounded(self, tokens: list[int]) -> list[int]:
        raise NoTokenizerError

    def word_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        raise NoTokenizerError

    def decode(self, tokens: Sequence[int], *, keeps_special: bool = False) -> str:
        return ""

    def written(self, tokens: Sequence[int]) -> str:
        return ""

    def spell(self, tokens: Sequence[int]) -> list[bytes]:
        raise NoTokenizerError

    def spell_in_text(
        self, tokens: Sequence[int], text: Sequence[int], places: Sequence[int], *, keeps_special: bool = False
    ) -> list[bytes]:
        raise NoTokenizerError

    def is_visible(self, token: int, *, keeps_special: bool = False) -> bool:
        return False


def read_tokenizer(folder: Path | str, *, keeps_special: bool = False) -> Tokenizer:
    """Returns a checkpoint's tokenizer, or `NoTokenizer` if it has none. Takes the arguments of `Tokenizer`.

    Raises:
        CheckpointError: the tokenizer cannot be read.
    """
    return Tokenizer(folder, keeps_special=keeps_special) if has_tokenizer(Path(folder)) else NoTokenizer()
