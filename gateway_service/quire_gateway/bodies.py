"""What callers send, field by field, as OpenAI and vLLM name it. A field that nobody knows is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

CHOICES_MAX = 64  # of one prompt, as the worker has it
PROMPTS_MAX = 64
_PROMPTS = "must be a text, an array of token ids, or an array of either"
Token: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
Count: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPTS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": _IDS},
    ]
}
Prompts: TypeAlias = "tuple[str | tuple[int, ...], ...]"


def read_prompts(given: object) -> Prompts:
    """Returns the prompts of a completion: a text, tokens, or several of either.

    Raises:
        ValueError: it is something else, or there are too many.
    """
    if isinstance(given, str) or _are_tokens(given):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError(_PROMPTS)
    if len(given) > PROMPTS_MAX:
        raise ValueError(f"a batch has at most {PROMPTS_MAX} prompts")
    if all(isinstance(prompt, str) for prompt in given):
        return tuple(given)
    if all(map(_are_tokens, given)):
        return tuple(map(tuple, given))
    raise ValueError(_PROMPTS)


def _are_tokens(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int and 0 <= token < 2**32 for token in given)


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # nothing is ever added
    continuous_usage_stats: bool | None = None


class Body(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: Any) -> Any:
        """Takes a parameter of null for one that is not given, whoever knows it: clients write all of theirs down."""
        if not isinstance(given, dict) or None not in given.values():
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.model_fields}

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # taken and not used: a key says who calls
    metadata: dict[str, str] | None = None  # likewise

    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    # vLLM's, beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] | None = None  # lower is sooner
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    banned_token_ids: list[Token] | None = None  # Quire's own
    use_beam_search: bool | None = None  # its beams are `n`
    length_penalty: float | None = None

    # vLLM's, of which only what changes nothing is taken
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    logprob_token_ids: list[Token] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    return_token_offsets: bool | None = None
    routed_experts_prompt_start: int | None = None
    mm_payload: str | None = None

    # transformers'
    num_beams: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    early_stopping: bool | Literal["never"] | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(Body):
    """What POST /v1/completions takes."""

    prompt: Annotated[Prompts, PlainValidator(read_prompts), WithJsonSchema(_PROMPTS_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # 0 with an echo alone
    best_of: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True  # as vLLM has it: those that the tokenizer puts around a text


class Message(BaseModel):
    """One message of a conversation; a chat template may know further keys."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(Body):
    """What POST /v1/chat/completions takes."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # taken and not used: a text is all that there is
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    service_tier: str | None = None
    store: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    web_search_options: dict[str, Any] | None = None
    verbosity: str | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    add_special_tokens: bool | None = False  # a template writes them itself
    echo: bool | None = None
    include_reasoning: bool | None = None
    prompt_cache_key: str | None = None  # taken and not used: every prefix is found by what it is
    safety_identifier: str | None = None  # likewise: a key says who calls
