"""Lists every parameter of OpenAI, vLLM, transformers and Quire, with a value that changes an answer of the demo model.

vLLM's names and defaults are those of `CompletionRequest`, `ChatCompletionRequest` and `ResponsesRequest` in
`vllm/entrypoints/openai/{completion,chat_completion,responses}/protocol.py` of vLLM 0.32.0. Parameters that every
caller sets, such as `request_id`, have the default None here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel
from quire_gateway.bodies import ChatBody, CompletionBody
from quire_gateway.responses.bodies import ResponseBody

ENDPOINTS: Final = ("chats", "completions", "responses")
PROMPT: Final = "A for statement iterates over the items of a sequence, in the order that they appear. The for"
# The template renders every option that a caller can pass, so that each option changes the number of prompt tokens.
TEMPLATE: Final = (
    "{% for message in messages %}{{ message.content }}\n\n{% endfor %}{{ reasoning_effort | default('') }}"
    "{{ shout | default('') }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}An answer:\n{% endif %}"
)

_VLLM_OF_ALL: Final[Mapping[str, Any]] = {
    "cache_salt": None, "ec_transfer_params": None, "frequency_penalty": None, "ignore_eos": False,
    "include_stop_str_in_output": False, "kv_transfer_params": None, "logit_bias": None, "min_p": None,
    "mm_payload": "tensors", "model": None, "presence_penalty": None, "priority": 0, "repetition_penalty": None,
    "request_id": None, "return_mm_kwargs": None, "seed": None, "session_id": None, "skip_special_tokens": True,
    "stop": [], "stop_token_ids": [], "stream": False, "structured_outputs": None, "temperature": None, "top_k": None,
    "top_p": None, "user": None, "vllm_xargs": None, "watermarking": None,
}  # fmt: skip
_VLLM_OF_TEXTS: Final[Mapping[str, Any]] = {
    **_VLLM_OF_ALL,
    "allowed_token_ids": None, "bad_words": [], "echo": False, "length_penalty": 1.0, "logprob_token_ids": None,
    "min_tokens": 0, "n": 1, "prompt_logprobs": None, "repetition_detection": None, "response_format": None,
    "return_token_ids": None, "return_token_offsets": False, "return_tokens_as_token_ids": None,
    "routed_experts_prompt_start": 0, "spaces_between_special_tokens": True, "stream_interval": None,
    "stream_options": None, "thinking_token_budget": None, "truncate_prompt_tokens": None, "truncation_side": None,
    "use_beam_search": False,
}  # fmt: skip
VLLM: Final[Mapping[str, Mapping[str, Any]]] = {
    "chats": {
        **_VLLM_OF_TEXTS,
        "add_generation_prompt": True, "add_special_tokens": False, "chat_template": None,
        "chat_template_kwargs": None, "continue_final_message": False, "documents": None, "include_reasoning": True,
        "logprobs": False, "max_completion_tokens": None, "max_tokens": None, "media_io_kwargs": None,
        "messages": None, "mm_processor_kwargs": None, "parallel_tool_calls": True, "reasoning_effort": None,
        "return_prompt_text": None, "tool_choice": None, "tools": None, "top_logprobs": 0,
    },
    "completions": {
        **_VLLM_OF_TEXTS,
        "add_special_tokens": True, "logprobs": None, "max_tokens": 16, "prompt": None, "prompt_embeds": None,
        "suffix": None,
    },
    "responses": {
        **_VLLM_OF_ALL,
        "background": False, "chat_template_kwargs": None, "enable_response_messages": False, "include": None,
        "include_reasoning": True, "input": None, "instructions": None, "max_output_tokens": None,
        "max_tool_calls": None, "media_io_kwargs": None, "metadata": None, "mm_processor_kwargs": None,
        "parallel_tool_calls": True, "previous_input_messages": None, "previous_response_id": None, "prompt": None,
        "prompt_cache_key": None, "reasoning": None, "service_tier": "auto", "store": True, "text": None,
        "tool_choice": "auto", "tools": [], "top_logprobs": 0, "truncation": "disabled",
    },
}  # fmt: skip
OPENAI: Final[Mapping[str, frozenset[str]]] = {
    "chats": frozenset({*chat_create_params.CompletionCreateParamsBase.__annotations__, "stream"}),
    "completions": frozenset({*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"}),
    "responses": frozenset({*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}),
}
OURS: Final[Mapping[str, type[BaseModel]]] = {
    "chats": ChatBody,
    "completions": CompletionBody,
    "responses": ResponseBody,
}
KNOWN: Final = frozenset().union(*OPENAI.values(), *VLLM.values(), *(body.model_fields for body in OURS.values()))


class Tried(NamedTuple):
    """A value of a parameter, and the other fields of both requests, with and without it."""

    value: Any
    beside: Mapping[str, Any] = {}


FUNCTION: Final = {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}}}
TOOLS: Final = {"chats": [{"type": "function", "function": FUNCTION}], "responses": [{"type": "function", **FUNCTION}]}
_DRAWN: Final = {"temperature": 2, "seed": 5}
_EDGE: Final = {"logit_bias": {"0": 100}}  # Token 0 ends the text at once.


# These values do not depend on the greedy answer.
_FIXED: Final = {
    "tools": Tried(TOOLS, {"tool_choice": "none"}),
    "tool_choice": Tried("required", {"tools": TOOLS}),  # `TOOLS` stands for the tools in the endpoint's form
    "parallel_tool_calls": Tried(False, {"tools": TOOLS, "tool_choice": "required"}),
    "reasoning_effort": Tried("low"),
    "reasoning": Tried({"effort": "low"}),
    "include_reasoning": Tried(False),
    "add_generation_prompt": Tried(False),
    "continue_final_message": Tried(True, {"add_generation_prompt": False}),
    "chat_template": Tried("{{ messages[0].content }}"),
    "chat_template_kwargs": Tried({"shout": "loud"}),
    "instructions": Tried("Be brief."),
    "text": Tried({"format": {"type": "json_object"}}),
    "background": Tried(True),
    "store": Tried(True),
    "service_tier": Tried("flex"),
    "metadata": Tried({"a": "b"}),
    "prompt_cache_key": Tried("key"),
    "prompt_cache_options": Tried({"mode": "implicit"}),
    "prompt_cache_retention": Tried("24h"),
    "safety_identifier": Tried("someone"),
    "max_tool_calls": Tried(3),
    "include": Tried(["reasoning.encrypted_content"]),
    "modalities": Tried(["text", "audio"]),
    "audio": Tried({"voice": "alloy", "format": "wav"}),
    "prediction": Tried({"type": "content", "content": "The"}),
    "functions": Tried([FUNCTION]),
    "function_call": Tried({"name": "look"}),
    "web_search_options": Tried({}),
    "verbosity": Tried("low"),
    "moderation": Tried({"model": "omni-moderation-latest"}),
    "documents": Tried([{"text": "a"}]),
    "logprob_token_ids": Tried([1]),
    "return_tokens_as_token_ids": Tried(True),
    "spaces_between_special_tokens": Tried(False),
    "return_token_offsets": Tried(True),
    "routed_experts_prompt_start": Tried(1),
    "mm_payload": Tried("none"),
    "truncation": Tried("auto"),
    "conversation": Tried("conv_1"),
    "context_management": Tried([{"type": "compaction"}]),
    "previous_response_id": Tried("resp_1"),
    "access_programs": Tried([{}]),
    "background_options": Tried({"a": 1}),
    "image": Tried({"a": 1}),
    "prompt_embeds": Tried("AAAA"),
    "thinking_token_budget": Tried(5),
    "truncation_side": Tried("right"),
    "request_id": Tried("mine"),
    "session_id": Tried("mine"),
    "repetition_detection": Tried({"a": 1}),
    "stream_interval": Tried(4),
    "watermarking": Tried(True),
    "return_mm_kwargs": Tried(True),
    "return_prompt_text": Tried(True),
    "kv_transfer_params": Tried({"a": 1}),
    "ec_transfer_params": Tried({"a": 1}),
    "vllm_xargs": Tried({"a": 1}),
    "media_io_kwargs": Tried({"video": {}}),
    "mm_processor_kwargs": Tried({"a": 1}),
    "enable_response_messages": Tried(True),
    "previous_input_messages": Tried([{"role": "user", "content": "a"}]),
}


def tried(first: list[int], text: str) -> dict[str, Tried]:
    """Returns a value of each parameter that has the same form at every endpoint.

    Args:
        first: tokens of the greedy answer without the parameters.
        text: text of that answer.
    """
    token = first[4]
    return {
        "messages": Tried([{"role": "user", "content": "Another question"}]),
        "prompt": Tried("Another question"),
        "input": Tried("Another question"),
        "model": Tried("demo"),
        "frequency_penalty": Tried(2, {"max_tokens": 60}),
        "presence_penalty": Tried(2, {"max_tokens": 60}),
        "repetition_penalty": Tried(2.0),
        "logit_bias": Tried({str(first[0]): -100}),
        "logprobs": Tried(1),
        "top_logprobs": Tried(2),
        "max_tokens": Tried(3),
        "max_completion_tokens": Tried(3),
        "max_output_tokens": Tried(3),
        "n": Tried(2),
        "best_of": Tried(2, {**_DRAWN, "n": 1}),
        "seed": Tried(6, {"temperature": 2, "seed": 5}),
        "stop": Tried([text[6:10]]),
        "stream": Tried(True),
        "stream_options": Tried({"include_usage": True}, {"stream": True}),
        "suffix": Tried("the end"),
        "temperature": Tried(2, {"seed": 5}),
        "top_p": Tried(0.01, _DRAWN),
        "top_k": Tried(1, _DRAWN),
        "min_p": Tried(1, _DRAWN),
        "user": Tried("someone"),
        "echo": Tried(True),
        "use_beam_search": Tried(True, {"n": 2}),
        "num_beams": Tried(4),
        "length_penalty": Tried(4.0, {"num_beams": 4}),
        "early_stopping": Tried(True, {"num_beams": 4}),
        "stop_token_ids": Tried([token]),
        "include_stop_str_in_output": Tried(True, {"stop": [text[6:10]]}),
        "ignore_eos": Tried(True, _EDGE),
        "min_tokens": Tried(5, _EDGE),
        "skip_special_tokens": Tried(False, {**_EDGE, "ignore_eos": True}),
        "truncate_prompt_tokens": Tried(2),
        "allowed_token_ids": Tried([first[0], first[1]]),
        "banned_token_ids": Tried([first[0]]),
        "bad_words": Tried([text.split()[1]]),
        "prompt_logprobs": Tried(1),
        "add_special_tokens": Tried(False),
        "response_format": Tried({"type": "json_object"}),
        "structured_outputs": Tried({"regex": "(yes|no)"}),
        "guided_json": Tried({"type": "boolean"}),
        "guided_regex": Tried("(yes|no)"),
        "guided_choice": Tried(["yes", "no"]),
        "guided_grammar": Tried('start: "yes" | "no"'),
        "priority": Tried(5),
        "return_token_ids": Tried(True),
        "cache_salt": Tried("salt"),
        "cache_no_store": Tried(True),
        **_FIXED,
    }
