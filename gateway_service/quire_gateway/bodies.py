"""Bodies of requests, field by field, with the names of OpenAI and vLLM. An unknown field is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from quire.protocol.limits import PRIORITY_MAX

CHOICES_MAX = 64  # choices per prompt; workers also enforce most of the limits in this list
PROMPTS_MAX = 64
PROMPT_TOKENS_MAX = 1 << 19  # the same limit as for all values of a body; each worker limits its prompts further
MESSAGES_MAX = 8_192
PARTS_MAX = 4_096  # parts of one message
STOPS_MAX = 16
STOP_TOKENS_MAX = 64
TOKENS_MAX = 1 << 16  # allowed tokens of a request, or banned ones
BIASES_MAX = 1_024
CHOICE_TEXTS_MAX = 1_024
TOOLS_MAX = 1_024
LOGPROBS_MAX = 20
BAD_WORDS_MAX = 256
SALT_MAX = 128
METADATA_MAX = 16  # keys of `metadata`; OpenAI has the same limit
_PROMPTS = "must be a string, an array of token ids, or an array of either"


def _is_number(given: object) -> object:
    """Returns a value that may be a number. Pydantic would also accept a text, and true.

    Raises:
        PydanticCustomError: the value is a text, true or false.
    """
    if isinstance(given, bool | str):
        shown = "a string" if isinstance(given, str) else "true" if given else "false"
        raise PydanticCustomError("number", f"must be a number, not {shown}")
    return given


_NUMBER = BeforeValidator(_is_number)
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False), _NUMBER]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False), _NUMBER]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]
Token: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Count: TypeAlias = Annotated[int, Field(ge=1, lt=2**31), _NUMBER]
MaxTokens: TypeAlias = Annotated[int, Field(ge=0, lt=2**31), _NUMBER]  # 0: only the prompt is computed
Choices: TypeAlias = Annotated[int, Field(ge=1, le=CHOICES_MAX), _NUMBER]
Logprobs: TypeAlias = Annotated[int, Field(ge=0, le=LOGPROBS_MAX), _NUMBER]
Tokens: TypeAlias = Annotated[list[Token], Field(max_length=TOKENS_MAX, fail_fast=True)]
PromptTokens: TypeAlias = Annotated[list[Token], Field(min_length=1, max_length=PROMPT_TOKENS_MAX, fail_fast=True)]
Texts: TypeAlias = Annotated[list[str], Field(max_length=CHOICE_TEXTS_MAX, fail_fast=True)]
Objects: TypeAlias = Annotated[list[dict[str, Any]], Field(max_length=TOOLS_MAX, fail_fast=True)]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": PROMPT_TOKENS_MAX}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": PROMPTS_MAX}
_PROMPTS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {**_SEVERAL, "items": {"type": "string"}},
        {**_SEVERAL, "items": _IDS},
    ]
}
Prompts: TypeAlias = "tuple[str | tuple[int, ...], ...]"


def read_prompts(given: object) -> Prompts:
    """Returns the prompts of a completion: a text, tokens, or several of either.

    Raises:
        ValueError: the value is something else, or there are too many prompts.
    """
    if isinstance(given, str) or _are_tokens(given):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError(_PROMPTS)
    if len(given) > PROMPTS_MAX:
        raise ValueError(f"a batch may have at most {PROMPTS_MAX} prompts, not {len(given):,}")
    if all(isinstance(prompt, str) for prompt in given):
        return tuple(given)
    longest = max(len(prompt) if isinstance(prompt, list) else 0 for prompt in given)
    if longest > PROMPT_TOKENS_MAX:
        raise ValueError(f"a prompt may have at most {PROMPT_TOKENS_MAX:,} tokens, not {longest:,}")
    if all(map(_are_tokens, given)):
        return tuple(map(tuple, given))
    raise ValueError(_PROMPTS)


def _are_tokens(given: object) -> bool:
    return (
        isinstance(given, list)
        and bool(given)
        and set(map(type, given)) == {int}
        and min(given) >= 0
        and max(given) < 2**32
    )


def _read_logprobs(given: object) -> object:
    """Returns how many logprobs a completion wants. False means none, as in chats.

    Raises:
        PydanticCustomError: the value is true, which gives no number.
    """
    if given is True:
        raise PydanticCustomError(
            "number", f"must be a number from 0 to {LOGPROBS_MAX}, not true; only chats take true"
        )
    return None if given is False else given


class StreamOptions(BaseModel):
    """Options of a stream: its data in addition to the text."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Flag | None = None
    include_obfuscation: Flag | None = None  # accepted; the gateway never adds obfuscation
    continuous_usage_stats: Flag | None = None


class Body(BaseModel):
    """Parameters that both endpoints take."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: Any) -> Any:
        """Drops unknown parameters that are null: clients also send parameters that they leave unset."""
        if not isinstance(given, dict) or None not in given.values():
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.model_fields}

    model: str | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # accepted, not used: the key identifies the caller
    # This server has one tier, `default`. An answer names `default`, whatever tier the request names.
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=METADATA_MAX)] | None = None  # accepted, not used

    n: Choices | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), _NUMBER] | None = None
    stop: str | Annotated[list[str], Field(max_length=STOPS_MAX, fail_fast=True)] | None = None
    # OpenAI's limit is 2. Workers would take larger temperatures.
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False), _NUMBER] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(strict=True, ge=-100, le=100, allow_inf_nan=False)]],
            Field(max_length=BIASES_MAX),
        ]
        | None
    ) = None

    # vLLM's parameters, beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1, lt=2**31), _NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER] | None = None
    repetition_penalty: Number | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=STOP_TOKENS_MAX, fail_fast=True)] | None = None
    ignore_eos: Flag | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), _NUMBER] | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=TOKENS_MAX, fail_fast=True)] | None = None
    # On vLLM's scale: a request with a lower number starts sooner.
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX), _NUMBER] | None = None
    prompt_logprobs: Logprobs | None = None
    banned_token_ids: Tokens | None = None  # Quire's own parameter
    use_beam_search: Flag | None = None  # If true, `n` is the number of beams.
    length_penalty: Number | None = None
    # Number of tokens to keep at the prompt's end; -1 keeps as many as fit.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31), _NUMBER] | None = None

    bad_words: Annotated[list[str], Field(max_length=BAD_WORDS_MAX, fail_fast=True)] | None = None
    include_stop_str_in_output: Flag | None = None
    # Whether the tokenizer puts special tokens around the text. In a chat, the template writes the special tokens.
    add_special_tokens: Flag | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=SALT_MAX)] | None = None
    cache_no_store: Flag | None = None  # Quire's own parameter: no other request hits this request's blocks

    # vLLM's parameters; only values that change nothing are accepted.
    logprob_token_ids: Annotated[list[Token], Field(max_length=CHOICE_TEXTS_MAX, fail_fast=True)] | None = None
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None
    skip_special_tokens: Flag | None = None
    spaces_between_special_tokens: Flag | None = None
    return_token_offsets: Flag | None = None
    routed_experts_prompt_start: Annotated[int, _NUMBER] | None = None
    mm_payload: str | None = None

    # Parameters of transformers.
    num_beams: Choices | None = None
    early_stopping: Flag | Literal["never"] | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None


class CompletionBody(Body):
    """Body of POST /v1/completions."""

    prompt: Annotated[Prompts, PlainValidator(read_prompts), WithJsonSchema(_PROMPTS_SCHEMA)]
    max_tokens: MaxTokens | None = None
    best_of: Choices | None = None
    echo: Flag | None = None
    logprobs: Annotated[Logprobs | None, BeforeValidator(_read_logprobs)] = None
    suffix: str | None = None


class Message(BaseModel):
    """One message of a conversation; a chat template may know further keys."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(max_length=PARTS_MAX, fail_fast=True)] | None = None


class PromptBody(BaseModel):
    """Fields of bodies that have one prompt: a text, tokens or a chat."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | PromptTokens | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = True


class ChatBody(Body):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: Flag | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    modalities: Texts | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    store: Flag | None = None
    functions: Objects | None = None
    function_call: Any = None
    web_search_options: dict[str, Any] | None = None
    verbosity: str | None = None
    documents: Objects | None = None
    chat_template: str | None = None
    echo: Flag | None = None
    include_reasoning: Flag | None = None
    moderation: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None  # accepted, not used: the key identifies the caller
