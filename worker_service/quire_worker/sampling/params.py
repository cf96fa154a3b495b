"""Sampling parameters of a request, and the checks of their ranges."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_TOKENS_DEFAULT = 16
SAMPLE_COUNT_MAX = 64
STOP_TOKEN_COUNT_MAX = 64
STOP_TEXT_COUNT_MAX = 16
STOP_CHARACTER_COUNT_MAX = 256  # limit per stop text; delivery may hold back this much of a text
TEMPERATURE_MIN = 1e-3  # at lower temperatures, logits of common size overflow float32; 0 means greedy
TEMPERATURE_MAX = 100.0
REPETITION_PENALTY_MIN = 0.01
REPETITION_PENALTY_MAX = 100.0
PENALTY_MAX = 2.0  # presence and frequency penalties are from -2 to 2
BAD_WORD_COUNT_MAX = 256  # every token is compared with each bad word
BIAS_MAX = 100.0  # biases are from -100 to 100
BIAS_COUNT_MAX = 1024
TOKEN_LIST_COUNT_MAX = 1 << 16  # limit for allowed tokens, and for banned tokens
LOGPROB_COUNT_MAX = 20
LENGTH_PENALTY_MAX = 5.0  # penalties are from -5 to 5, so that the power of any length fits into float32
STRUCTURE_BYTES_MAX = 64 << 10
CHOICE_COUNT_MAX = 1024
INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1


class StructureKind(enum.Enum):
    """Kinds of structures that a request can ask for. The values are the names of the request's fields."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure that a text must have.

    Attributes:
        kind: how `texts` are read.
        texts: one text, or all choices.
    """

    kind: StructureKind
    texts: tuple[str, ...]


class EarlyStopping(enum.Enum):
    """Rules that end a beam search once it has as many finished texts as beams, with transformers' values."""

    HEURISTIC = "false"  # the search ends if the best beam, at its present length, scores no better than the worst text
    ALWAYS = "true"  # the search ends at once
    NEVER = "never"  # the search ends if no beam can become better at any length


class ParameterError(ValueError):
    """A sampling parameter has an invalid value.

    Attributes:
        name: the parameter's name; the message begins with it.
    """

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}")
        self.name = name


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters that decide how the tokens of a request are chosen, and where its texts end."""

    max_tokens: int = MAX_TOKENS_DEFAULT  # most tokens of each sample
    temperature: float = 0.0  # 0 is greedy: top_k, top_p, min_p and seed have no effect
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int | None = None  # None: a different seed every time
    n: int = 1  # number of samples of the prompt
    stop_token_ids: tuple[int, ...] = ()  # each token ends a sample, like the model's end-of-text token
    ignore_eos: bool = False
    min_p: float = 0.0  # smallest probability, as a share of the likeliest token's
    repetition_penalty: float = 1.0  # penalty for tokens in the prompt or the text
    presence_penalty: float = 0.0  # penalty for tokens in the text
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()  # empty: all tokens are allowed
    banned_token_ids: Sequence[int] = ()
    stop: tuple[str, ...] = ()  # texts that end a sample
    min_tokens: int = 0
    logprobs: int | None = None  # number of likeliest alternatives with the chosen token's logprob; None: no logprobs
    prompt_logprobs: int | None = None
    best_of: int | None = None  # samples to compute; the n likeliest are returned. None: n
    echo: bool = False
    structure: Structure | None = None
    num_beams: int = 1  # beams of a beam search; 1: no beam search
    length_penalty: float = 1.0  # a beam's sum of logprobs is divided by its length to this power
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    skip_special_tokens: bool = True  # whether special tokens are left out of the text
    include_stop_in_output: bool = False  # whether the text includes the stop text or stop token
    bad_words: tuple[str, ...] = ()  # texts that a sample never completes
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the tokens of `bad_words`

    @property
    def is_greedy(self) -> bool:
        """Returns whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def sample_count(self) -> int:
        """Counts the samples that are computed."""
        return self.num_beams if self.has_beams else self.best_of or self.n

    @property
    def has_beams(self) -> bool:
        """Returns whether beam search finds the texts."""
        return self.num_beams > 1

    @property
    def is_best_of(self) -> bool:
        """Returns whether more samples are computed than returned."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def has_penalties(self) -> bool:
        """Returns whether earlier tokens of the prompt or text change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def validate(self) -> None:
        """Checks every field.

        Raises:
            ParameterError: a field is out of range.
        """
        _check_integer("max_tokens", self.max_tokens, 1, INT32_MAX)
        _check_integer("top_k", self.top_k, 0, INT32_MAX)
        _check_integer("n", self.n, 1, SAMPLE_COUNT_MAX)
        if self.best_of is not None:
            _check_integer("best_of", self.best_of, self.n, SAMPLE_COUNT_MAX)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, UINT64_MAX)
        if not _is_number(self.temperature) or not (
            self.temperature == 0 or TEMPERATURE_MIN <= self.temperature <= TEMPERATURE_MAX
        ):
            what = f"must be 0 or from {TEMPERATURE_MIN} to {TEMPERATURE_MAX}, not {_shown(self.temperature)}"
            raise ParameterError("temperature", what)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ParameterError("top_p", f"must be above 0 and at most 1, not {_shown(self.top_p)}")
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX)
        _check_number("presence_penalty", self.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
        _check_number("frequency_penalty", self.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
        self._check_tokens()
        self._check_ends()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, LOGPROB_COUNT_MAX)
        if self.structure is not None:
            _check_structure(self.structure)
        self._check_beams()

    def check_vocabulary(self, size: int) -> None:
        """Checks that all token ids of the parameters exist.

        Raises:
            ParameterError: a token id is not below `size`, or there are too many beams for the vocabulary.
        """
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids"):
            largest = max(getattr(self, name), default=0)
            if largest >= size:
                raise ParameterError(name, f"has token id {largest}, which must be below the vocabulary size, {size}")
        if self.has_beams and self.num_beams * (2 + len(self.stop_token_ids)) > size:
            raise ParameterError("num_beams", f"of {self.num_beams} needs more tokens than the vocabulary has, {size}")

    def _check_tokens(self) -> None:
        check_count("stop_token_ids", self.stop_token_ids, STOP_TOKEN_COUNT_MAX)
        check_count("logit_bias", self.logit_bias, BIAS_COUNT_MAX)
        check_count("allowed_token_ids", self.allowed_token_ids, TOKEN_LIST_COUNT_MAX)
        check_count("banned_token_ids", self.banned_token_ids, TOKEN_LIST_COUNT_MAX)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids"):
            for token in getattr(self, name):
                _check_integer(name, token, 0, INT32_MAX)
        for bias in self.logit_bias.values():
            _check_number("logit_bias", bias, -BIAS_MAX, BIAS_MAX)

    def _check_ends(self) -> None:
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_count("stop", self.stop, STOP_TEXT_COUNT_MAX)
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= STOP_CHARACTER_COUNT_MAX:
                found = f"one of {len(text):,}" if isinstance(text, str) else repr(text)[:64]
                raise ParameterError(
                    "stop", f"must be texts of 1 to {STOP_CHARACTER_COUNT_MAX} characters, not {found}"
                )
        check_count("bad_words", self.bad_words, BAD_WORD_COUNT_MAX)
        for text in self.bad_words:
            if not isinstance(text, str) or not text.strip() or len(text) > STOP_CHARACTER_COUNT_MAX:
                what = f"must be texts of 1 to {STOP_CHARACTER_COUNT_MAX} characters, and not only of spaces"
                raise ParameterError("bad_words", what)

    def _check_beams(self) -> None:
        _check_integer("num_beams", self.num_beams, 1, SAMPLE_COUNT_MAX)
        _check_number("length_penalty", self.length_penalty, -LENGTH_PENALTY_MAX, LENGTH_PENALTY_MAX)
        if not self.has_beams:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != getattr(_DEFAULTS, name):
                    raise ParameterError(name, "needs num_beams above 1")
            return
        if self.n > self.num_beams:
            raise ParameterError("n", f"must be at most num_beams={self.num_beams}, not {self.n}")
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != getattr(_DEFAULTS, name):
                own = self.structure.kind.value if name == "structure" and self.structure is not None else name
                what = "cannot be combined with num_beams, because beams are chosen by the model's own logprobs"
                raise ParameterError(own, what)


_DEFAULTS = SamplingParams()
# Parameters that change logits, or describe a text before it is known. Parameters that a greedy choice ignores, such as
# top_k, are missing here: beam search ignores them, too.
_NOT_WITH_BEAMS = (
    *("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids"),
    *("banned_token_ids", "bad_words", "stop", "logprobs", "prompt_logprobs", "best_of", "structure"),
)


def _check_structure(structure: Structure) -> None:
    name = structure.kind.value
    if structure.kind is StructureKind.CHOICE:
        check_count(name, structure.texts, CHOICE_COUNT_MAX)
    if not structure.texts or not all(structure.texts):
        raise ParameterError(name, "must not be empty")
    byte_count = sum(len(text.encode()) for text in structure.texts)
    if byte_count > STRUCTURE_BYTES_MAX:
        raise ParameterError(name, f"must have at most {STRUCTURE_BYTES_MAX:,} bytes, not {byte_count:,}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_number(name: str, value: float, low: float, high: float) -> None:
    # A caller's bound that arrives as float32 may be just below `low` by rounding.
    if not _is_number(value) or not (low <= value <= high or math.isclose(value, low, rel_tol=1e-7)):
        raise ParameterError(name, f"must be from {low} to {high}, not {_shown(value)}")


def _shown(value: object) -> str:
    """Returns a number as its caller wrote it: 1.1 instead of 1.100000023841858, which float32 makes of it."""
    return f"{value:.7g}" if isinstance(value, float) else repr(value)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(name, f"must be an integer from {low} to {high}, not {value!r}")


def check_count(name: str, values: Sequence[object] | Mapping[int, float], most: int) -> None:
    """Checks the length of a list.

    Raises:
        ParameterError: the list has more than `most` entries.
    """
    if len(values) > most:
        raise ParameterError(name, f"must have at most {most} entries, not {len(values)}")
