"""From a caller's body to what the workers are asked: pure, and the place where a parameter is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast

from quire.sampling import SamplingOptions

from quire_gateway.bodies import Body, ChatBody, CompletionBody, Message
from quire_gateway.failures import PROMPT, invalid, missing, unsupported

MAX_TOKENS_DEFAULT: Final = 16  # of completions, as OpenAI has it; an answer in a chat may be as long as the model's

# What workers are asked for under the same name, if this version of the client has it; else it is refused, unless the
# value is one that changes nothing.
_SAME_NAME: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (),
    "top_p": (),
    "top_k": (0, -1),
    "seed": (),
    "n": (),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "echo": (False,),
    "allowed_token_ids": ([],),
    "banned_token_ids": ([],),
    "length_penalty": (1,),
    "early_stopping": (False,),
}
# What no worker does, and values of them that change nothing.
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "verbosity": (),
    "store": (False,),
    "continue_final_message": (False,),
    "service_tier": ("auto", "default"),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "logprob_token_ids": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "cache_salt": (),
    "documents": ([],),
    "chat_template": (),
    "include_reasoning": (True,),
}


class Chat(NamedTuple):
    """A conversation that a worker is to write down and tokenize."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any]
    with_generation_prompt: bool


Prompt: TypeAlias = "str | tuple[int, ...] | Chat"


class Ask(NamedTuple):
    """One request of a caller.

    Attributes:
        model: that it names, if it does.
        prompts: one, but for batches of completions.
        options: of every prompt, but for how many tokens.
        max_tokens: None where as many are wanted as there is room for.
        choice_count: answers to each prompt.
        is_streamed: whether pieces are wanted as they come.
        with_usage: whether a stream ends with what it took.
        top_logprob_count: likeliest tokens to tell of each token; None where no logarithms are wanted.
        prompt_logprob_count: the same of the prompt's tokens, which are told apart from those of the text.
        names: what the workers' fields are called there.
        priority: as workers have it, larger is sooner; vLLM's, which callers give, is the other way round.
        is_echo_alone: whether nothing but the prompt is wanted; workers compute a token behind it, which is not told.
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
    is_echo_alone: bool = False

    @property
    def prompt_param(self) -> str:
        """Returns what the prompt is called there."""
        return self.names[PROMPT]


def of_completion(body: CompletionBody) -> Ask:
    """Reads the body of a completion.

    Raises:
        ApiError: it asks for what is not served, which the error names.
    """
    names = {PROMPT: "prompt", "max_tokens": "max_tokens", "logprobs": "logprobs"}
    is_echo_alone = body.max_tokens == 0
    if is_echo_alone and not body.echo:
        raise invalid("max_tokens", "max_tokens must be at least 1, or 0 with echo=true")
    max_tokens = MAX_TOKENS_DEFAULT if body.max_tokens is None else max(body.max_tokens, 1)
    return _ask(body, body.prompt, max_tokens, body.logprobs, names)._replace(is_echo_alone=is_echo_alone)


def of_chat(body: ChatBody) -> Ask:
    """Reads the body of a chat.

    Raises:
        ApiError: it asks for what is not served, which the error names.
    """
    # As vLLM has it: a variable for the template, which models that can be told how much to think have.
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    chat = Chat(
        tuple(_message(number, message) for number, message in enumerate(body.messages)),
        tuple(body.tools or ()),
        {**effort, **(body.chat_template_kwargs or {})},
        body.add_generation_prompt,
    )
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    names = {
        PROMPT: "messages",
        "messages_json": "messages",
        "tools_json": "tools",
        "variables": "chat_template_kwargs",
        "variables_json": "chat_template_kwargs",
        "max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        "logprobs": "top_logprobs",
    }
    return _ask(body, (chat,), body.max_completion_tokens or body.max_tokens, top, names)


def _ask(
    body: Body,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    top_logprob_count: int | None,
    names: Mapping[str, str],
) -> Ask:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is for streams: it needs stream=true")
    for name, neutral in _REFUSED.items():
        value = getattr(body, name, None)
        if value is not None and value not in neutral:
            raise unsupported(name)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs is not for streams: it needs stream=false")
    options: dict[str, Any] = {"temperature": 1.0}  # OpenAI's default
    for name, neutral in _SAME_NAME.items():
        _put(options, name, name, getattr(body, name, None), neutral)
    beam_count = body.num_beams or (body.n or 1 if body.use_beam_search else 1)
    beams_name = "use_beam_search" if body.use_beam_search and body.num_beams is None else "num_beams"
    _put(options, beams_name, "num_beams", beam_count, (1,))
    if beam_count > 1 and body.temperature is None:
        options["temperature"] = 0.0  # beams are not drawn
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _put(options, "stop", "stop", stop, ((),))
    _put(options, "logit_bias", "logit_bias", _biases(body.logit_bias), ({},))
    _put(options, names["logprobs"], "logprobs", top_logprob_count, ())
    echoed = top_logprob_count if options.get("echo") else None  # the prompt is part of the answer, its logprobs too
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
    for name, (option, value) in _structure(body).items():
        _put(options, name, option, value, ())
        names[option] = name
    if "seed" in options:
        options["seed"] %= 2**64  # a worker's seeds have no sign
    return Ask(
        body.model,
        prompts,
        cast("SamplingOptions", options),
        max_tokens,
        body.n or 1,
        bool(body.stream),
        body.stream_options is not None and bool(body.stream_options.include_usage),
        top_logprob_count,
        body.prompt_logprobs,
        names,
        -(body.priority or 0),
    )


def _put(options: dict[str, Any], name: str, option: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Notes an option of the workers, unless the value is not there or changes nothing.

    Raises:
        ApiError: no worker of this version has that option.
    """
    if value is None or value in neutral:
        return
    if option not in SamplingOptions.__annotations__:
        raise unsupported(name)
    options[option] = tuple(value) if isinstance(value, list) else value


def _biases(given: Mapping[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (given or {}).items()}
    except ValueError:
        raise invalid("logit_bias", "logit_bias is by token id") from None


def _structure(body: Body) -> dict[str, tuple[str, Any]]:
    """Returns what the text has to be, in any of the forms in which it is asked for: (option, value) by parameter."""
    found: dict[str, tuple[str, Any]] = {}
    kinds = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    structured = _structured_outputs(body, kinds)
    for kind, option in kinds.items():
        given = getattr(body, f"guided_{kind}")
        if given is not None:
            found[f"guided_{kind}"] = (option, given)
        given = structured.get(kind)
        if given is not None:
            found["structured_outputs"] = (option, given)
    format_ = body.response_format or {"type": "text"}
    match format_.get("type"):
        case "text":
            pass
        case "json_object":
            found["response_format"] = ("json_schema", {"type": "object"})
        case "json_schema":
            found["response_format"] = ("json_schema", _schema_of(format_))
        case _:
            raise invalid(
                "response_format", "response_format has no type that is known: text, json_object, json_schema"
            )
    if len(found) > 1:
        raise invalid(next(reversed(found)), f"only one of {', '.join(found)} can be asked for")
    return found


def _schema_of(format_: Mapping[str, Any]) -> Any:
    """Returns the schema of a response format.

    Raises:
        ApiError: it has none, or one that is no JSON schema.
    """
    name = "response_format.json_schema"
    given = format_.get("json_schema")
    if not isinstance(given, dict):
        raise missing(name) if given is None else invalid(name, f"{name} must be an object")
    schema = given.get("schema")
    if schema is None:
        raise missing(f"{name}.schema")
    if not isinstance(schema, dict | bool):
        raise invalid(f"{name}.schema", f"{name}.schema must be a JSON schema")
    return schema


def _structured_outputs(body: Body, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Returns the one structure that vLLM's parameter asks for, if any; what has no effect there has none here.

    Raises:
        ApiError: it is none of ours, or there are several.
    """
    found = {name: value for name, value in (body.structured_outputs or {}).items() if value not in (None, False)}
    if found.pop("json_object", None) is not None:
        found.setdefault("json", {"type": "object"})
    for name in sorted(found.keys() - kinds):
        raise unsupported(f"structured_outputs.{name}", f"is none of {', '.join(kinds)}, json_object")
    if len(found) > 1:
        raise invalid("structured_outputs", f"only one of {', '.join(sorted(found))} can be asked for")
    return found


def _message(number: int, message: Message) -> dict[str, Any]:
    """Returns a message as templates take it: its content as one text.

    Raises:
        ApiError: a part of it is no text.
    """
    values = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        texts = []
        for index, part in enumerate(message.content):
            if part.get("type") not in ("text", "input_text", "refusal"):
                where = f"messages[{number}].content[{index}]"
                raise unsupported(where, f"is of type {part.get('type')!r}: this server takes text alone")
            text = part.get("refusal" if part["type"] == "refusal" else "text")
            if not isinstance(text, str):
                where = f"messages[{number}].content[{index}].text"
                raise missing(where) if text is None else invalid(where, f"{where} must be a text")
            texts.append(text)
        values["content"] = "\n".join(texts)
    return values
