"""Structures of texts, as masks over the vocabulary: JSON schemas, regular expressions, grammars, choices.

    1. compiled   first in a separate process, which measures its size (`calls/structures.py`), then on a thread. If
                  that fails, the caller gets the error
    2. begun      each sample of a request has a matcher, a copy of the compiled matcher
    3. followed   the matcher gives a mask before each token, then takes the token. While the grammar leaves the text
                  free, tokens are only collected, until the grammar has to check a token (`openings.py`)
    4. ended      by an end-of-text token, which is allowed once the text is complete

llguidance parses: it is an Earley parser over derivatives of regular expressions, in Rust. Fuel limits the steps. A
grammar that runs out of fuel fails only its own request.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire_worker.sampling.masks import contains
from quire_worker.sampling.openings import Openings, openings_in
from quire_worker.sampling.params import Structure, StructureKind
from quire_worker.sampling.schema_numbers import NumberError, grammar_with_exact_numbers, schema_with_exact_numbers
from quire_worker.sampling.words import word_count

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ERROR_CHARACTERS_MAX = 300
CACHED_GRAMMAR_COUNT_MAX = 64
CACHED_BYTES_MAX = 64 << 20  # most bytes of cached grammars
BYTES_MAX = 128 << 20  # most bytes of cached grammars and of grammars that requests use
GRAMMAR_BYTES_MIN = 64 << 10  # a grammar counts as at least this many bytes
WAITING_MAX = 1024  # most tokens of a free text that wait for parsing; parsing so many delays a pass by 1 to 2 ms
# JSON without optional whitespace: an uncertain model could fill any number of tokens with whitespace.
JSON_OPTIONS = {"whitespace_flexible": False}


class GrammarsFullError(Exception):
    """The structures of running requests take all the memory reserved for structures."""


class GrammarError(ValueError):
    """A structure that cannot be compiled; the message begins with the name of the request's field."""


class Matcher:
    """Position of one sample's text in its grammar."""

    def __init__(
        self, matcher: LLMatcher, eos_token_ids: Collection[int], openings: Openings | None = None, begun: bytes = b""
    ) -> None:
        """Takes over a matcher of llguidance.

        Args:
            matcher: the matcher; nothing else may use it afterwards.
            eos_token_ids: the model's end-of-text tokens.
            openings: the text is free until one of these; None if the text was never free, or already has an opening.
            begun: the end of the text so far that an opening may begin with.
        """
        self._matcher = matcher
        self._openings, self._begun = openings, begun
        self._waiting: list[int] = []  # tokens of a free text that the matcher has not taken yet
        self._whole: Matcher | None = None  # in a copy: the compiled matcher, which must live as long as any copy
        self._eos_token_ids = eos_token_ids
        self.has_ended = False

    @property
    def has_failed(self) -> bool:
        """Returns whether the grammar has become too complex to continue."""
        return not self.has_ended and self._matcher.is_error()

    def take(self, token: int) -> None:
        """Takes a token that the mask allowed. Tokens after the end of the text are ignored."""
        if self.has_ended:
            return
        if self._is_free(token):
            self._waiting.append(token)
            if len(self._waiting) >= WAITING_MAX:
                self._up_to_date()
            return
        self._up_to_date().consume_token(token)
        self.has_ended = token in self._eos_token_ids
        if self._openings is not None:
            begun = self._openings.begun(self._begun, token)
            self._openings, self._begun = (None, b"") if begun is None else (self._openings, begun)

    def allows(self, token: int, vocabulary: int) -> bool:
        """Returns whether a token may follow. May return False for an end-of-text token that the mask would allow.

        The method avoids computing the whole mask where possible. Computing it would walk all tokens of the vocabulary,
        usually missing the CPU's caches after a pass, and release the interpreter lock. The mask is needed only where
        the grammar determines the next bytes: of all tokens that could spell them, the mask allows one.

        Args:
            token: the token.
            vocabulary: the number of tokens in the vocabulary.
        """
        if self.has_ended or self._is_free(token):
            return True
        matcher = self._up_to_date()
        if matcher.validate_tokens([token]) != 1 or matcher.is_error():
            return False
        return not matcher.compute_ff_bytes() or contains(masks_of([self], vocabulary)[0], token)

    def fill(self, words: np.ndarray) -> None:
        """Writes the mask of the tokens that may follow.

        Args:
            words: int32 `[words]`, contiguous; all bits are 0 if the grammar has failed.
        """
        if self.has_ended:
            words.fill(-1)
            return
        matcher = self._up_to_date()
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            words.fill(0)

    def copy(self) -> Matcher:
        """Returns a copy for another text that continues from here."""
        twin = Matcher(self._matcher.deep_copy(), self._eos_token_ids, self._openings, self._begun)
        twin.has_ended, twin._whole, twin._waiting = self.has_ended, self._whole or self, self._waiting[:]
        return twin

    def _is_free(self, token: int) -> bool:
        return self._openings is not None and not self._begun and self._openings.is_free(token)

    def _up_to_date(self) -> LLMatcher:
        if self._waiting:
            self._matcher.consume_tokens(self._waiting)
            self._waiting = []
        return self._matcher


def masks_of(matchers: Sequence[Matcher], vocabulary: int) -> np.ndarray:
    """Returns the mask of the tokens that may follow each text, int32 `[matchers, words]`."""
    words = np.empty((len(matchers), word_count(vocabulary)), dtype=np.int32)
    for row, matcher in zip(words, matchers, strict=True):
        matcher.fill(row)
    return words


class Grammars:
    """Compiles structures for one model, and caches the most recently used structures. Any thread may call it.

    Args:
        tokenizer: returns the tokenizer's JSON; called once, for the first structure.
        vocabulary: number of tokens in the model's vocabulary.
        eos_token_ids: the model's end-of-text tokens.
    """

    def __init__(self, tokenizer: Callable[[], str], vocabulary: int, eos_token_ids: Collection[int]) -> None:
        self._describe_tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_token_ids = frozenset(token for token in eos_token_ids if token < vocabulary)
        self._lock = threading.RLock()  # reentrant: garbage collection may call `_let_go` while the lock is held
        self._tokenizer: LLTokenizer | None = None
        self._kept: dict[Structure, tuple[Matcher, int]] = {}  # matchers and their bytes, the most recently used last
        self._byte_count = 0  # bytes of all living compiled matchers

    def known(self, structure: Structure) -> Matcher | None:
        """Returns the matcher of an empty text if the structure is cached, else None."""
        with self._lock:
            kept = self._kept.pop(structure, None)
            if kept is None:
                return None
            self._kept[structure] = kept
            return kept[0].copy()

    def compile(self, structure: Structure, byte_count: int = 0) -> Matcher:
        """Compiles and caches a structure, and returns the matcher of an empty text.

        Args:
            structure: the structure of the text.
            byte_count: the measured memory of the compiled structure.

        Raises:
            GrammarError: llguidance refuses the structure, or the model has no end-of-text token.
            GrammarsFullError: there is no memory for it.
        """
        byte_count = max(byte_count, GRAMMAR_BYTES_MIN)
        with self._lock:
            while self._kept and self._byte_count + byte_count > CACHED_BYTES_MAX:
                del self._kept[next(iter(self._kept))]
            if self._byte_count + byte_count > BYTES_MAX:
                raise GrammarsFullError
        matcher = self.compiled(structure)
        with self._lock:
            self._byte_count += byte_count
            weakref.finalize(matcher, self._let_go, byte_count)
            self._kept[structure] = matcher, byte_count
            while len(self._kept) > CACHED_GRAMMAR_COUNT_MAX:
                del self._kept[next(iter(self._kept))]
        return matcher.copy()

    def compiled(self, structure: Structure) -> Matcher:
        """Compiles a structure without caching it, and returns the matcher of an empty text.

        Raises:
            GrammarError: see `compile`.
        """
        if not self._eos_token_ids:
            raise GrammarError(f"{structure.kind.value} needs a model with an end-of-text token")
        return self._new_matcher(structure)

    def _let_go(self, byte_count: int) -> None:
        with self._lock:
            self._byte_count -= byte_count

    def _new_matcher(self, structure: Structure) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        name, limits = structure.kind.value, LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self.prepare(), _grammar_of(structure), log_level=0, limits=limits)
        if matcher.is_error():
            what = " ".join(matcher.get_error().split())  # joins the message's lines
            raise GrammarError(f"{name} cannot be used: {what[:ERROR_CHARACTERS_MAX]}")
        ready = Matcher(matcher, self._eos_token_ids)
        words = np.empty(word_count(self._vocabulary), dtype=np.int32)
        ready.fill(words)  # The first mask may take long. llguidance caches it, so that no pass has to wait for it.
        if not words.any():
            raise GrammarError(f"{name} cannot be used: it allows no text, or is too complex to check")
        if structure.kind is not StructureKind.GRAMMAR:
            return ready
        try:
            texts = openings_in(structure.texts[0])
        except ValueError as error:
            raise GrammarError(f"{name} cannot be used: {error}") from None
        tokenizer, ends = self.prepare(), self._eos_token_ids

        def is_text(token: int) -> bool:
            return contains(words, token) and token not in ends and not tokenizer.is_special_token(token)

        openings = Openings(texts, lambda token: tokenizer.decode_bytes([token]), is_text) if texts else None
        return Matcher(matcher, ends, openings)

    def prepare(self) -> LLTokenizer:
        """Returns the tokenizer; the first call reads it."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    self._describe_tokenizer(), n_vocab=self._vocabulary, eos_token=sorted(self._eos_token_ids)
                )
            return self._tokenizer


def _grammar_of(structure: Structure) -> str:
    """Returns a structure as a grammar for llguidance.

    Raises:
        GrammarError: a JSON schema is not a JSON object, or has a number that would be rounded.
    """
    from llguidance import LLMatcher

    text = structure.texts[0]
    try:
        if structure.kind is StructureKind.JSON_SCHEMA:
            text = schema_with_exact_numbers(text, "json_schema")
        elif structure.kind is StructureKind.GRAMMAR:
            text = grammar_with_exact_numbers(text, "grammar")
    except NumberError as error:
        raise GrammarError(str(error)) from None
    if structure.kind is StructureKind.JSON_SCHEMA:
        if text.strip() == "true":
            text = "{}"  # `{}` has the same meaning; llguidance takes only objects.
        if not text.lstrip().startswith("{"):
            raise GrammarError("json_schema must be a JSON object, or true, which allows any value")
        try:
            return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        except ValueError as error:
            raise GrammarError(f"json_schema cannot be read: {str(error)[:ERROR_CHARACTERS_MAX]}") from None
    if structure.kind is StructureKind.REGEX:
        return LLMatcher.grammar_from_regex(text)
    if structure.kind is StructureKind.GRAMMAR:
        if text.lstrip().startswith("{"):  # llguidance would read this as its own JSON form, which may hold schemas
            raise GrammarError("grammar must be written in Lark's notation, not as JSON")
        return LLMatcher.grammar_from_lark(text)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in structure.texts))
