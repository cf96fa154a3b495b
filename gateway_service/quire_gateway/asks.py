"""Translates a caller's body into the request for the workers. Pure. Wrong parameters are refused here, by their
names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast

from quire.sampling import SamplingOptions

from quire_gateway.bodies import Body, ChatBody, CompletionBody
from quire_gateway.cache_wishes import Wish, wish_of
from quire_gateway.calls.tools import ToolChoice, Tools, tools_of
from quire_gateway.conversations import Chat, chat_of
from quire_gateway.failures import PROMPT, invalid, unsupported
from quire_gateway.structures import structure_of

# OpenAI's default for completions. Without a limit, an answer in a chat may be as long as the model allows.
MAX_TOKENS_DEFAULT: Final = 16
TOP_P_MIN: Final = 1e-9
TEMPERATURE: Final = 1.0  # OpenAI's default temperature
_TOKEN: Final = re.compile("0|[1-9][0-9]{0,9}", re.ASCII)
TEMPERATURE_MIN: Final = 1e-3  # least temperature above 0 at workers; at lower ones the likeliest token is certain

# Parameters that workers have under the same name, each with its neutral values. If the installed `quire` client lacks
# the option, a parameter with another value is refused.
_SAME_NAME: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "seed": (),
    "n": (),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (),
    "min_p": (),
    "min_tokens": (0,),
    "best_of": (1,),
    "echo": (False,),
    "allowed_token_ids": (),
    "banned_token_ids": ([],),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "bad_words": ([],),
}
# Parameters that no worker supports. Only the default and the listed values, which change nothing, are accepted.
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "verbosity": ("medium",),
    "store": (False,),
    "moderation": (),
    "logprob_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "mm_payload": ("tensors",),
    "documents": ([],),
}


# Options that constrain an answer. A request may have only one of these options.
STRUCTURES: Final = ("json_schema", "regex", "grammar", "choice")
Prompt: TypeAlias = "str | tuple[int, ...] | Chat"


class Ask(NamedTuple):
    """One request of a caller, translated for the workers.

    Attributes:
        model: the name in the request; None if it names no model.
        prompts: one prompt; several only for a batch of completions.
        options: the sampling options that all prompts share, except `max_tokens`.
        max_tokens: the limit of the answer; 0 for no answer, None for as many tokens as the model allows.
        choice_count: the number of answers to each prompt.
        is_streamed: whether the caller gets the answer piece by piece.
        with_usage: whether a stream ends with its token counts.
        top_logprob_count: number of likeliest tokens to return with each token; None without logprobs.
        prompt_logprob_count: the same number for the prompt's tokens, whose logprobs are returned separately.
        names: the caller's names of the workers' fields.
        priority: on the workers' scale: larger is sooner. Callers use vLLM's scale: lower is sooner.
        with_usage_so_far: whether each piece has the token counts of its choice so far.
        with_token_ids: whether token ids are returned beside the text.
        tools: the functions that the model may call; None where the answer is text.
        tells_reasoning: whether the caller wants the reasoning; None where an answer has no parts but its text.
        service_tier: the caller's value; it has no effect.
        add_special_tokens: whether a prompt gets the checkpoint's special tokens around a text; None for the default.
        is_cut_to_fit: whether `max_tokens` may be lowered, because the caller did not choose it.
        cache_salt: only requests with the same salt share prefixes.
        prompt_tokens_max: tokens kept at the end of a prompt; 0 for as many as fit, None for all.
        logprob_tellings: how many times an answer sends its logprobs. If more than once, a stream keeps them.
        wish: what the cache should do with its blocks.
        cache_key: requests of one key go to the same worker, among equally good ones.
    """

    model: str | None
    prompts: tuple[Prompt, ...]
    options: SamplingOptions
    max_tokens: int | None
    choice_count: int
    is_streamed: bool
    with_usage: bool
    top_logprob_count: int | None
    prompt_logprob_count: int | None
    names: Mapping[str, str]
    priority: int
    with_usage_so_far: bool
    with_token_ids: bool
    tools: Tools | None = None
    tells_reasoning: bool | None = None
    service_tier: str | None = None
    prompt_tokens_max: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str = ""
    is_cut_to_fit: bool = False
    logprob_tellings: int = 1
    wish: Wish = Wish()
    cache_key: str = ""

    @property
    def is_prompt_alone(self) -> bool:
        """Tells whether no answer is wanted. Workers still draw one token, which is not returned."""
        return self.max_tokens == 0

    @property
    def edits_chunks(self) -> bool:
        """Tells whether the answer's text differs from the worker's: an echo precedes the text, or no text is sent."""
        return self.is_prompt_alone or bool(self.options.get("echo"))

    @property
    def prompt_param(self) -> str:
        """Returns the name of the prompt's parameter in the caller's API, such as `messages`."""
        return self.names[PROMPT]


def of_completion(body: CompletionBody) -> Ask:
    """Reads the body of a completion.

    Raises:
        ApiError: a parameter is not supported; the error names it.
    """
    names = {PROMPT: "prompt", "max_tokens": "max_tokens", "logprobs": "logprobs"}
    max_tokens = MAX_TOKENS_DEFAULT if body.max_tokens is None else body.max_tokens
    ask = _ask(body, body.prompt, max_tokens, body.logprobs, names)
    return ask._replace(wish=Wish(is_hidden=bool(body.cache_no_store)))


def of_continuation(body: Body, max_tokens: int | None, top_logprob_count: int | None) -> Ask:
    """Reads a body that continues a branch: a completion of a prompt that the worker already has.

    Raises:
        ApiError: a parameter is not supported; the error names it.
    """
    if body.cache_no_store:
        raise unsupported("cache_no_store", "must be given when a branch is made: it applies to the whole branch")
    names = {PROMPT: PROMPT, "max_tokens": "max_tokens", "logprobs": "logprobs"}
    return _ask(body, ((),), max_tokens or MAX_TOKENS_DEFAULT, top_logprob_count, names)


def of_chat(body: ChatBody) -> Ask:
    """Reads the body of a chat.

    Raises:
        ApiError: a parameter is not supported; the error names it.
    """
    tools, chat = tools_of(body), chat_of(body)
    if body.echo:
        raise unsupported("echo")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    top = (body.top_logprobs or 0) if body.logprobs else None
    names = {
        PROMPT: "messages",
        "messages_json": "messages",
        "tools_json": "tools",
        "variables": "chat_template_kwargs",
        "variables_json": "chat_template_kwargs",
        "include_stop_in_output": "include_stop_str_in_output",
        "max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        "logprobs": "top_logprobs",
    }
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ask = _ask(body, (chat,), max_tokens, top, names, tells_reasoning=body.include_reasoning is not False)
    return _with_tools(ask._replace(wish=wish_of(body), cache_key=body.prompt_cache_key or ""), tools)


def _with_tools(ask: Ask, tools: Tools | None) -> Ask:
    """Returns the request with the tools that its answer can call.

    An answer that must be calls has no content, so constraints on the content are dropped.

    Raises:
        ApiError: the content has a constraint that cannot be combined with calls.
    """
    if tools is None:
        return ask
    structure = next((name for name in STRUCTURES if name in ask.options), None)
    if structure is None:
        return ask._replace(tools=tools)
    if tools.choice is not ToolChoice.AUTO:
        options = {name: value for name, value in ask.options.items() if name != structure}
        return ask._replace(tools=tools, options=cast("SamplingOptions", options))
    if structure != "json_schema":
        raise unsupported(ask.names[structure], "cannot be combined with tools: only a JSON schema can")
    return ask._replace(tools=tools)


def _ask(
    body: Body,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    top_logprob_count: int | None,
    names: Mapping[str, str],
    *,
    tells_reasoning: bool | None = None,
) -> Ask:
    _check_together(body)
    given = body.model_fields_set  # Names are checked before values: most bodies have only a few of these fields.
    for name, neutral in _REFUSED.items():
        if name not in given:
            continue
        value = getattr(body, name)
        if value is not None and value not in neutral and value != type(body).model_fields[name].default:
            raise unsupported(name)
    options: dict[str, Any] = {}
    for name, neutral in _SAME_NAME.items():
        if name in given:
            _put(options, name, name, getattr(body, name), neutral)
    _settle_edges(options)
    beam_count = body.num_beams or (body.n or 1 if body.use_beam_search else 1)
    beams_name = "use_beam_search" if body.use_beam_search and body.num_beams is None else "num_beams"
    _put(options, beams_name, "num_beams", beam_count, (1,))
    if (beam_count > 1 or body.use_beam_search) and body.temperature is None:
        options["temperature"] = 0.0  # Beam search draws no random tokens.
    _put(options, "include_stop_str_in_output", "include_stop_in_output", body.include_stop_str_in_output, (False,))
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _put(options, "stop", "stop", stop, ((),))
    _put(options, "logit_bias", "logit_bias", _biases(body.logit_bias), ({},))
    _put(options, names["logprobs"], "logprobs", top_logprob_count, ())
    echoed = top_logprob_count if options.get("echo") else None  # An echo has the prompt's logprobs, too.
    counts = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    of_prompt = names["logprobs"] if body.prompt_logprobs is None else "prompt_logprobs"
    _put(options, of_prompt, "prompt_logprobs", max(counts, default=None), ())
    names = {
        **names,
        "text": names[PROMPT],
        "tokens": names[PROMPT],
        "adapter": "model",
        "num_beams": beams_name,
        "prompt_logprobs": of_prompt,
    }
    for name, (option, value) in structure_of(body).items():
        _put(options, name, option, value, ())
        names[option] = name
    if "seed" in options:
        options["seed"] %= 2**64  # workers take unsigned seeds
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Ask(
        body.model,
        prompts,
        cast("SamplingOptions", options),
        max_tokens,
        body.n or 1,
        bool(body.stream),
        with_usage,
        top_logprob_count,
        body.prompt_logprobs,
        names,
        -(body.priority or 0),  # Only this function converts vLLM's scale to Quire's.
        with_usage and bool(body.stream_options and body.stream_options.continuous_usage_stats),  # as in vLLM
        bool(body.return_token_ids),
        tells_reasoning=tells_reasoning,
        service_tier=body.service_tier,
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt or "",
        prompt_tokens_max=_kept(body.truncate_prompt_tokens),
    )


def _check_together(body: Body) -> None:
    """Checks fields whose values depend on each other.

    Raises:
        ApiError: two fields contradict each other.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream=true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs needs stream=false")
    best_of = getattr(body, "best_of", None)
    if best_of is not None and best_of < (body.n or 1):
        raise invalid("best_of", f"best_of must be at least n={body.n}, not {best_of}")


def _kept(count: int | None) -> int | None:
    """Returns how many tokens to keep at the end of a prompt: 0 for as many as fit, None for all.

    Raises:
        ApiError: the caller gave 0.
    """
    if count == 0:
        raise invalid(
            "truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1 to keep as many tokens as fit"
        )
    return None if count is None else max(count, 0)


def with_defaults(ask: Ask, proposed: Mapping[str, float | int | None]) -> Ask:
    """Returns a request with defaults filled in: the caller's values first, then the checkpoint's, then OpenAI's.

    Beam search gets no defaults: it draws no tokens, and no penalty is meant for it.

    Args:
        ask: the request with the caller's values.
        proposed: values of the checkpoint's generation_config.json; None where it has none.
    """
    max_tokens = proposed.get("max_tokens")
    if ask.max_tokens is None and max_tokens is not None:
        ask = ask._replace(max_tokens=int(max_tokens), is_cut_to_fit=True)
    if ask.options.get("num_beams", 1) > 1:
        return ask
    given = {name: value for name, value in proposed.items() if value is not None and name != "max_tokens"}
    options: dict[str, Any] = {"temperature": TEMPERATURE, **given}
    _settle_edges(options)
    return ask._replace(options=cast("SamplingOptions", {**options, **ask.options}))


def _put(options: dict[str, Any], name: str, option: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Sets an option of the workers, unless the value is missing or neutral.

    Raises:
        ApiError: workers of this version do not have that option.
    """
    if value is None or value in neutral:
        return
    if option not in SamplingOptions.__annotations__:
        raise unsupported(name)
    options[option] = tuple(value) if isinstance(value, list) else value


def _settle_edges(options: dict[str, Any]) -> None:
    """Replaces values that OpenAI allows and workers do not by the nearest allowed ones.

    Such values are a `temperature` that is almost 0, and a `top_p` of 0. In both cases the likeliest token stays
    certain.
    """
    if 0 < options.get("temperature", 1) < TEMPERATURE_MIN:
        options["temperature"] = TEMPERATURE_MIN
    if options.get("top_p") == 0:
        options["top_p"] = TOP_P_MIN


def _biases(given: Mapping[str, float] | None) -> dict[int, float]:
    wrong = next((token for token in given or () if not _TOKEN.fullmatch(token)), None)
    if wrong is not None:
        raise invalid(
            "logit_bias", f"the keys of logit_bias must be token ids as strings, such as '42', not {wrong[:32]!a}"
        )
    return {int(token): bias for token, bias in (given or {}).items()}
