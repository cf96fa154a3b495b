"""What a text has to be, as masks over the vocabulary: JSON schemas, regular expressions, grammars, choices.

    1. compiled   on a thread of its own, for a bounded time and size; what cannot be compiled is told to its caller
    2. begun      each sample of a request has a matcher, a copy of what was compiled
    3. followed   a mask before each token, of all samples of a batch together, and the token after it
    4. ended      with an end-of-text token, which is allowed where the text is whole

Parsing is llguidance's, an Earley parser over derivatives of regular expressions in Rust, whose steps are bounded by
its fuel: a grammar that runs out of it fails its own request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire_worker.sampling.masks import word_count
from quire_worker.sampling.params import Structure, StructureKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ERROR_CHARACTERS_MAX = 300
CACHED_GRAMMAR_COUNT_MAX = 64
# JSON without optional whitespace: a model that is not sure of itself can fill any number of tokens with it.
JSON_OPTIONS = {"whitespace_flexible": False}


class GrammarError(ValueError):
    """A structure that cannot be compiled; the message begins with the name of its field."""


class Matcher:
    """Where one sample's text stands in its grammar."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Collection[int]) -> None:
        """Takes over a matcher of llguidance."""
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self.has_ended = False

    @property
    def has_failed(self) -> bool:
        """Tells whether the grammar has become too complex to go on with."""
        return not self.has_ended and self._matcher.is_error()

    def take(self, token: int) -> None:
        """Follows the text by a token that its mask allowed; what comes after its end is not looked at."""
        if not self.has_ended:
            self._matcher.consume_token(token)
            self.has_ended = token in self._eos_token_ids

    def fill(self, words: np.ndarray) -> None:
        """Writes which tokens may follow.

        Args:
            words: int32 `[words]`, contiguous; nothing is allowed where the grammar has failed.
        """
        if self.has_ended:
            words.fill(-1)
        elif self._matcher.is_error():
            words.fill(0)
        else:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                words.fill(0)

    def copy(self) -> Matcher:
        """Returns the same for a text that goes on from here by itself."""
        twin = Matcher(self._matcher.deep_copy(), self._eos_token_ids)
        twin.has_ended = self.has_ended
        return twin


def masks_of(matchers: Sequence[Matcher], vocabulary: int) -> np.ndarray:
    """Returns which tokens may follow each text, int32 `[matchers, words]`."""
    words = np.empty((len(matchers), word_count(vocabulary)), dtype=np.int32)
    for row, matcher in zip(words, matchers, strict=True):
        matcher.fill(row)
    return words


class Grammars:
    """Compiles structures for one model. `compile` may be called from any thread.

    Args:
        tokenizer: returns the tokenizer's JSON; called once, when the first structure comes.
        vocabulary: tokens of the model.
        eos_token_ids: of the model, which end a text.
    """

    def __init__(self, tokenizer: Callable[[], str], vocabulary: int, eos_token_ids: Collection[int]) -> None:
        self._describe_tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_token_ids = frozenset(token for token in eos_token_ids if token < vocabulary)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: dict[Structure, Matcher] = {}  # the latest last

    def compile(self, structure: Structure) -> Matcher:
        """Returns the matcher of a text that has not begun.

        Raises:
            GrammarError: llguidance does not take it, or the model has no token to end a text with.
        """
        with self._lock:
            known = self._compiled.pop(structure, None)
            if known is not None:
                self._compiled[structure] = known
                return known.copy()
        name = structure.kind.value
        if not self._eos_token_ids:
            raise GrammarError(f"{name} needs a model with an end-of-text token")
        matcher = self._new_matcher(name, _grammar_of(structure))
        with self._lock:
            self._compiled[structure] = matcher
            while len(self._compiled) > CACHED_GRAMMAR_COUNT_MAX:
                del self._compiled[next(iter(self._compiled))]
        return matcher.copy()

    def _new_matcher(self, name: str, grammar: str) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer_of_model(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            what = " ".join(matcher.get_error().split())  # one line of its several
            raise GrammarError(f"{name} cannot be used: {what[:ERROR_CHARACTERS_MAX]}")
        ready = Matcher(matcher, self._eos_token_ids)
        words = np.empty(word_count(self._vocabulary), dtype=np.int32)
        ready.fill(words)  # the first mask may take long, and is kept; no pass should wait for it
        if not words.any():
            raise GrammarError(f"{name} cannot be used: no text fits it, or it is too complex to tell")
        return ready

    def _tokenizer_of_model(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    self._describe_tokenizer(), n_vocab=self._vocabulary, eos_token=sorted(self._eos_token_ids)
                )
            return self._tokenizer


def _grammar_of(structure: Structure) -> str:
    """Returns a structure in llguidance's words.

    Raises:
        GrammarError: it is no object in JSON where it has to be.
    """
    from llguidance import LLMatcher

    text = structure.texts[0]
    if structure.kind is StructureKind.JSON_SCHEMA:
        try:
            return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        except ValueError as error:
            raise GrammarError(f"json_schema cannot be read: {str(error)[:ERROR_CHARACTERS_MAX]}") from None
    if structure.kind is StructureKind.REGEX:
        return LLMatcher.grammar_from_regex(text)
    if structure.kind is StructureKind.GRAMMAR:
        return LLMatcher.grammar_from_lark(text)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in structure.texts))
