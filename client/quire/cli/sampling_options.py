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
    "max_tokens": (_option(int, "Tokens per sample at most.", min=1), 64),
    "min_tokens": (_option(int, "Tokens before which nothing else ends a sample.", min=0), 0),
    "temperature": (_option(float, "0 is greedy."), 0.0),
    "top_k": (_option(int, "Only the k likeliest tokens; 0 is all.", min=0), 0),
    "top_p": (_option(float, "Only the likeliest tokens that reach this probability."), 1.0),
    "min_p": (_option(float, "Only tokens with this share of the likeliest one's probability."), 0.0),
    "repetition_penalty": (_option(float, "Divides the logits of tokens that were there before; 1 is none."), 1.0),
    "presence_penalty": (_option(float, "Taken from the logits of tokens in the text so far, -2 to 2."), 0.0),
    "frequency_penalty": (_option(float, "The same, as often as they are there."), 0.0),
    "logit_bias": (_option(list[str], "Added to a token's logit, -100 to 100; repeat it.", metavar="ID=BIAS"), []),
    "allowed_token_id": (_option(list[int], "The only tokens to choose from; repeat it."), []),
    "banned_token_id": (_option(list[int], "A token that is never chosen; repeat it."), []),
    "seed": (_option(int | None, "Makes the random choice repeatable.", min=0), None),
    "n": (_option(int, "Samples; they share the prompt's blocks.", "-n", min=1), 1),
    "best_of": (_option(int | None, "Samples to take the n likeliest of.", min=1), None),
    "num_beams": (_option(int, "Beams of a beam search, of whose texts the n best are shown; 1 is none.", min=1), 1),
    "length_penalty": (_option(float, "Power of the length that a beam's logprobs are divided by."), 1.0),
    "early_stopping": (_option(_EarlyStopping, "When a beam search ends that has as many texts as beams."), "false"),
    "stop": (_option(list[str], "A text that ends a sample; repeat it."), []),
    "stop_token_id": (_option(list[int], "A token that ends a sample; repeat it."), []),
    "ignore_eos": (_option(bool, "Go on after the end of text.", "--ignore-eos"), False),
    "echo": (_option(bool, "Begin each text with the prompt.", "--echo"), False),
    "skip_special_tokens": (
        _option(bool, "Leave special tokens out of the text, or write them.", "--skip-special/--write-special"),
        True,
    ),
    "logprobs": (_option(int | None, "With --json, logprobs of each token and of so many likeliest.", min=0), None),
    "prompt_logprobs": (_option(int | None, "The same of the prompt's tokens.", min=0), None),
    "json_schema": (_option(str | None, "The text is a value of this JSON schema; @FILE reads it."), None),
    "regex": (_option(str | None, "The text is what this regular expression matches."), None),
    "grammar": (_option(str | None, "The text is what this Lark grammar derives; @FILE reads it."), None),
    "choice": (_option(list[str], "The text is one of these; repeat it."), []),
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
            f"--logit-bias must be a token's id, = and a number, such as 42=-1.5, not {text!r:.80}"
        ) from None
    _check("logit_bias", found[1], ranges.SAMPLING["logit_bias"])
    return found
