"""The bodies of POST /v1/responses and of paths below it. An unknown field is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from quire_gateway.bodies import CHOICE_TEXTS_MAX, MESSAGES_MAX, TOOLS_MAX, Body, Count, Flag, Logprobs

ID_CHARACTERS_MAX = 128  # characters of a response's id
LOGPROBS = "message.output_text.logprobs"
# Parts of an answer that are returned only on request. Requesting the parts other than `LOGPROBS` has no effect: they
# belong to tools and kinds of reasoning that this server does not have.
Includable: TypeAlias = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class Reasoning(BaseModel):
    """How much the model thinks, and which summary of its reasoning is returned."""

    model_config = ConfigDict(extra="forbid")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None  # accepted; the reasoning itself is returned, without a summary
    generate_summary: Literal["auto"] | None = None


class TextOptions(BaseModel):
    """Constraints on the text of an answer."""

    model_config = ConfigDict(extra="forbid")

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class InputTokensBody(BaseModel):
    """Body of POST /v1/responses/input_tokens: the parameters that determine the prompt of a response."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=ID_CHARACTERS_MAX)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: str | dict[str, Any] | None = None


class ResponseBody(Body, InputTokensBody):
    """Body of POST /v1/responses. vLLM's parameters are the same as for a chat."""

    store: Flag | None = None
    background: Flag | None = None
    max_output_tokens: Count | None = None
    include_reasoning: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: Annotated[list[Includable], Field(max_length=CHOICE_TEXTS_MAX, fail_fast=True)] | None = None
    max_tool_calls: Count | None = None  # accepted, not used: the limit is for OpenAI's own tools
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None  # accepted, not used: the key identifies the caller
    top_logprobs: Logprobs | None = None
    context_management: Annotated[list[dict[str, Any]], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    prompt: dict[str, Any] | None = None
    enable_response_messages: Flag | None = None  # vLLM's parameter; only false is accepted
