"""The sampling options of commands that generate, one for most fields of `SamplingParams`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from quire._transport import ranges
from quire.cli.options import replaced
from quire.cli.prompts import content
from quire.errors import InvalidArgumentError, UsageError
from quire.sampling import SamplingParams


def _option(kind: Any, text: str, *names: str, **settings: Any) -> Any:
    return Annotated[kind, typer.Option(*names, help=text, **settings)]


class _EarlyStopping(enum.StrEnum):
    FALSE = "false"
    TRUE = "true"
    NEVER = "never"


_OPTIONS: Final[dict[str, tuple[Any, Any]]] = {
    "max_tokens": (_option(int, "Maximum number of tokens per sample.", min=1), 64),
    "min_tokens": (_option(int, "Minimum number of tokens per sample: no stop condition applies earlier.", min=0), 0),
    "temperature": (_option(float, "Randomness of sampling; 0 is greedy."), 0.0),
    "top_k": (_option(int, "Sample only from the k likeliest tokens; 0 is all.", min=0), 0),
    "top_p": (_option(float, "Sample only from the likeliest tokens whose probabilities sum to this."), 1.0),
    "min_p": (_option(float, "Sample only tokens with at least this share of the likeliest token's probability."), 0.0),
    "repetition_penalty": (
        _option(float, "Makes tokens of the prompt and the text so far less likely; 1 is off."),
        1.0,
    ),
    "presence_penalty": (_option(float, "Subtracted from the logit of each token in the text so far, -2 to 2."), 0.0),
    "frequency_penalty": (
        _option(float, "Subtracted from a token's logit once per occurrence in the text so far, -2 to 2."),
        0.0,
    ),
    "logit_bias": (
        _option(list[str], "Added to a token's logit, -100 to 100; may be repeated.", metavar="ID=BIAS"),
        [],
    ),
    "allowed_token_id": (_option(list[int], "A token that may be chosen; others may not. May be repeated."), []),
    "banned_token_id": (_option(list[int], "A token that is never chosen; may be repeated."), []),
    "seed": (_option(int | None, "Seed that makes the random choices repeatable.", min=0), None),
    "n": (_option(int, "Number of samples; they share the prompt's blocks.", "-n", min=1), 1),
    "best_of": (_option(int | None, "Number of samples to generate; the n likeliest are shown.", min=1), None),
    "num_beams": (_option(int, "Number of beams of a beam search, which shows the n best texts; 1 is off.", min=1), 1),
    "length_penalty": (_option(float, "A beam's score is its logprob divided by its length to this power."), 1.0),
    "early_stopping": (
        _option(
            _EarlyStopping,
            "With as many texts as beams, a beam search ends: true, at once; false, if a better text is unlikely; "
            "never, if it is impossible.",
        ),
        "false",
    ),
    "stop": (_option(list[str], "A text that ends a sample; may be repeated."), []),
    "stop_token_id": (_option(list[int], "A token that ends a sample; may be repeated."), []),
    "ignore_eos": (_option(bool, "Continue after the end-of-text token.", "--ignore-eos"), False),
    "echo": (_option(bool, "Begin each text with the prompt.", "--echo"), False),
    "skip_special_tokens": (
        _option(bool, "Whether the text leaves special tokens out or includes them.", "--skip-special/--write-special"),
        True,
    ),
    "logprobs": (
        _option(int | None, "With --json, logprobs of each token and of this many likeliest tokens.", min=0),
        None,
    ),
    "prompt_logprobs": (_option(int | None, "With --json, the same for the tokens of the prompt.", min=0), None),
    "json_schema": (_option(str | None, "The text is JSON that this schema accepts; @FILE reads it."), None),
    "regex": (_option(str | None, "The text matches this regular expression."), None),
    "grammar": (_option(str | None, "The text follows this Lark grammar; @FILE reads it."), None),
    "choice": (_option(list[str], "The text is one of these choices; may be repeated."), []),
}

_OF_SEVERAL: Final = {"n", "best_of", "num_beams", "length_penalty", "early_stopping", "echo", "prompt_logprobs"}
ANSWER_TOKENS: Final = 1_024


def samples(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the sampling options to a command. The command gets their values as `params`.

    Raises:
        UsageError: from the command: a bias is invalid, or a file cannot be read.
    """
    return replaced(command, "params", _OPTIONS, _params_of)


def answers(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the sampling options that apply to a single answer. Raises the same errors as `samples`."""
    chosen = {name: option for name, option in _OPTIONS.items() if name not in _OF_SEVERAL}
    chosen["max_tokens"] = (_OPTIONS["max_tokens"][0], ANSWER_TOKENS)
    others = {name: default for name, (_, default) in _OPTIONS.items() if name in _OF_SEVERAL}
    return replaced(command, "params", chosen, lambda values: _params_of({**others, **values}))


def _params_of(values: dict[str, Any]) -> SamplingParams:
    for name, allowed in ranges.SAMPLING.items():
        if isinstance(values.get(name), (int, float)):
            _check(name, values[name], allowed)
    for name in ("allowed_token_id", "banned_token_id", "stop_token_id"):
        for token in values[name]:
            _check(name, token, ranges.UINT32)
        values[f"{name}s"] = tuple(values.pop(name))
    values["allowed_token_ids"] = values["allowed_token_ids"] or None
    values["logit_bias"] = dict(map(_bias, values["logit_bias"]))
    values["stop"] = tuple(values["stop"])
    values["early_stopping"] = {"false": False, "true": True}.get(values["early_stopping"], "never")
    values["choice"] = tuple(values["choice"]) or None
    for name in ("json_schema", "grammar"):
        values[name] = None if values[name] is None else content(name, values[name])
    return SamplingParams(**values)


def _check(name: str, value: float, allowed: ranges.Range) -> None:
    option = "-n" if name == "n" else f"--{name.replace('_', '-')}"
    try:
        ranges.check(option, value, allowed)
    except InvalidArgumentError as error:
        raise UsageError(error.message) from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        found = int(token), float(bias)
    except ValueError:
        raise UsageError(
            f"--logit-bias must be a token id, = and a number, such as 42=-1.5, not {text!r:.80}"
        ) from None
    _check("logit_bias", found[1], ranges.SAMPLING["logit_bias"])
    return found
