"""Tests how bodies become worker requests, and refusals that name the parameter."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from pydantic import ValidationError
from quire.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    QuireError,
    Reason,
    UnavailableError,
    code_of,
)
from quire_gateway import asks
from quire_gateway.bodies import ChatBody, CompletionBody
from quire_gateway.conversations import Chat
from quire_gateway.failures import ApiError, of_quire
from quire_gateway.probabilities import Places, Told, of_completion

NAMES = {"prompt": "prompt"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


def completion(**fields: Any) -> asks.Ask:
    return asks.of_completion(CompletionBody(prompt="p", **fields))


def chat(**fields: Any) -> asks.Ask:
    return asks.of_chat(ChatBody(messages=[{"role": "user", "content": "hi"}], **fields))  # type: ignore[list-item]


def test_what_is_not_said_is_openais_default() -> None:
    ask = completion()
    assert (asks.with_defaults(ask, {}).options, ask.max_tokens, ask.choice_count) == ({"temperature": 1.0}, 16, 1)
    assert (ask.is_streamed, ask.with_usage, ask.top_logprob_count) == (False, False, None)
    assert chat().max_tokens is None


def test_values_that_change_nothing_are_not_passed_on() -> None:
    ask = completion(presence_penalty=0, top_k=-1, logit_bias={}, stop=[], n=1, best_of=1, suffix="", echo=False)
    assert ask.options == {"n": 1, "top_k": -1}, "which counts against the checkpoint's proposal"


@pytest.mark.parametrize(
    ("fields", "option", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_object", "schema": None}}, "json_schema", {"type": "object"}),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"top_p": 0}, "top_p", 1e-9),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"structured_outputs": {"grammar": "start: 'a'"}}, "grammar", "start: 'a'"),
        ({"structured_outputs": {"json_object": True, "json": None}}, "json_schema", {"type": "object"}),
        ({"stop": "x"}, "stop", ("x",)),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"banned_token_ids": [3, 4]}, "banned_token_ids", (3, 4)),
        ({"prompt_logprobs": 2}, "prompt_logprobs", 2),
        ({"logit_bias": {"7": -1.5}}, "logit_bias", {7: -1.5}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_parameter_is_an_option_of_the_workers(fields: dict[str, Any], option: str, value: object) -> None:
    for ask in (completion(**fields), chat(**fields)):
        assert ask.options[option] == value  # type: ignore[literal-required]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "text"}, "guided_json": {}, "guided_regex": "a"}, "guided_regex", None),
        ({"structured_outputs": {"jsno": SCHEMA}}, "structured_outputs.jsno", "unsupported_parameter"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "unsupported_parameter",
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", None),
        ({"response_format": {"type": "yaml"}}, "response_format.type", None),
        ({"logit_bias": {"seven": 1}}, "logit_bias", None),
        ({"top_logprobs": 3}, "top_logprobs", None),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function",
            None,
        ),
        ({"tool_choice": "auto"}, "tool_choice", None),
        ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema", None),
        (
            {"response_format": {"type": "json_object", "strict": True}},
            "response_format.strict",
            "unsupported_parameter",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "unsupported_parameter"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "shcema": {}}}},
            "response_format.json_schema.shcema",
            "unsupported_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}},
            "response_format.schema",
            "unsupported_parameter",
        ),
        ({"guided_json": {"maximum": float("inf")}}, "guided_json", None),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", None),
        ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias", None),
        ({"logit_bias": {" 1": 1}}, "logit_bias", None),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias", None),
        ({"logit_bias": {"-1": 1}}, "logit_bias", None),
        ({"response_format": {}}, "response_format.type", None),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", None),
        ({"structured_outputs": {"grammar": ["a"]}}, "structured_outputs.grammar", None),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", None),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice", None),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", None),
        ({"guided_json": 5}, "guided_json", None),
        ({"structured_outputs": {}}, "structured_outputs", None),
        ({"structured_outputs": {"regex": None, "json_object": False}}, "structured_outputs", None),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
            "response_format.json_schema.schema",
            None,
        ),
        ({"continue_final_message": True}, "continue_final_message", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused_by_its_name(fields: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(ApiError) as raised:
        chat(**fields)
    assert raised.value.status == 400
    assert (raised.value.body["error"]["param"], raised.value.body["error"]["code"]) == (param, code)


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": 5}, {"type": "refusal", "text": "a"}])
def test_a_part_of_text_has_a_text(part: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as raised:
        asks.of_chat(ChatBody(messages=[{"role": "user", "content": [part]}]))  # type: ignore[list-item]
    assert raised.value.body["error"]["param"] == "messages[0].content[0].text"


@pytest.mark.parametrize("fields", [{"num_beams": 4}, {"use_beam_search": True, "n": 4}])
def test_beams_are_asked_for_in_vllms_words_or_in_those_of_transformers(fields: dict[str, Any]) -> None:
    options = completion(early_stopping="never", length_penalty=0.5, **fields).options
    assert (options["num_beams"], options["temperature"]) == (4, 0.0)
    assert (options["early_stopping"], options["length_penalty"]) == ("never", 0.5)
    assert completion(temperature=0.7, **fields).options["temperature"] == 0.7  # The worker refuses this value.
    assert "num_beams" not in completion(use_beam_search=False, n=4, num_beams=1, length_penalty=1.0).options


def test_what_clients_of_openai_and_vllm_send_without_effect_is_taken() -> None:
    plain = chat(user="u", metadata={"a": "b"}, parallel_tool_calls=False, prompt_cache_key="k", safety_identifier="s")
    assert plain.options == chat(service_tier="flex").options
    assert plain.options == chat(skip_special_tokens=True, bad_words=[], return_token_ids=False).options
    assert plain.options == {}
    assert not chat(stream=None, n=None, stop=None, temperature=None).is_streamed


def test_what_a_caller_gives_comes_before_what_the_checkpoint_proposes_and_that_before_openais_defaults() -> None:
    proposed = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_tokens": 9}
    assert asks.with_defaults(chat(), {}).options == {"temperature": 1.0}
    found = asks.with_defaults(chat(), proposed)
    assert found.options == {"temperature": 0.6, "top_k": 20}
    assert (found.max_tokens, found.is_cut_to_fit) == (9, True)
    found = asks.with_defaults(chat(temperature=0, top_k=-1, max_tokens=3), proposed)
    assert found.options == {"temperature": 0.0, "top_k": -1}
    assert (found.max_tokens, found.is_cut_to_fit) == (3, False)
    beams = completion(num_beams=4)
    assert asks.with_defaults(beams, proposed).options == beams.options, "beams are not drawn"


@pytest.mark.parametrize("name", ["kv_transfer_params", "prompt_embeds", "nobody_knows_it"])
def test_a_parameter_of_null_is_one_that_is_not_given(name: str) -> None:
    assert completion(**{name: None}) == completion()
    assert chat(**{name: None}) == chat()
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        completion(**{name: 1})


@pytest.mark.parametrize(("temperature", "asked"), [(2, 2.0), (1e-3, 1e-3), (1e-4, 1e-3), (1e-9, 1e-3), (0, 0.0)])
def test_a_temperature_that_is_next_to_none_is_the_least_that_a_worker_takes(temperature: float, asked: float) -> None:
    assert completion(temperature=temperature).options["temperature"] == asked


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
    ids=str,
)
def test_how_much_to_think_is_a_variable_of_the_template(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    (prompt,) = chat(**fields).prompts
    assert isinstance(prompt, Chat)
    assert prompt.variables == variables


def test_a_template_is_told_of_tools_where_no_call_is_to_be_read_out_of_the_text() -> None:
    (prompt,) = chat(tools=[TOOL], tool_choice="none").prompts
    assert isinstance(prompt, Chat)
    assert prompt.tools == (TOOL,)


def called(**function: Any) -> dict[str, Any]:
    """Returns a message of a model that has called a function."""
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", **function}}]}


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"a": [1]}', {"a": [1]}), ("", {}), (None, {}), ({"a": 1}, {"a": 1}), ("{bad", {}), ("[1]", {})],
    ids=str,
)
def test_calls_in_a_conversation_are_as_templates_take_them(arguments: object, read: dict[str, Any]) -> None:
    """Templates read the arguments of a call as an object; callers send them as text."""
    ask = asks.of_chat(ChatBody(messages=[called(arguments=arguments), {"role": "tool", "content": "4"}]))  # type: ignore[list-item]
    (prompt,) = ask.prompts
    assert isinstance(prompt, Chat)
    assert prompt.messages[0] == {**called(arguments=read), "content": ""}


@pytest.mark.parametrize("calls", [[5], [{"type": "custom"}], [{"type": "function"}], {"a": 1}])
def test_calls_that_are_none_are_refused_by_their_place(calls: object) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    with pytest.raises(ApiError) as raised:
        asks.of_chat(ChatBody(messages=[message]))  # type: ignore[list-item]
    assert raised.value.body["error"]["param"] == "messages[0].tool_calls"


def test_a_message_without_content_or_calls_has_an_empty_text() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": []}
    (prompt,) = asks.of_chat(ChatBody(messages=[message])).prompts  # type: ignore[list-item]
    assert isinstance(prompt, Chat)
    assert prompt.messages == ({"role": "assistant", "content": ""},)


@pytest.mark.parametrize(
    ("ask", "field", "param"),
    [
        (completion(), "temperature", "temperature"),
        (completion(), None, None),
        (completion(logprobs=2), "logprobs", "logprobs"),
        (completion(logprobs=2, echo=True), "prompt_logprobs", "logprobs"),
        (completion(prompt_logprobs=2), "prompt_logprobs", "prompt_logprobs"),
        (completion(use_beam_search=True, n=2), "num_beams", "use_beam_search"),
        (completion(guided_json={}), "json_schema", "guided_json"),
        (completion(structured_outputs={"regex": "("}), "regex", "structured_outputs"),
        (chat(logprobs=True, top_logprobs=2), "logprobs", "top_logprobs"),
        (chat(max_tokens=3), "max_tokens", "max_tokens"),
        (chat(max_completion_tokens=3), "max_tokens", "max_completion_tokens"),
        (chat(), "messages", "messages"),
        (chat(tools=[TOOL], tool_choice="none"), "tools", "tools"),
        (chat(), "variables", "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_worker_refuses_has_the_callers_name_for_it(ask: asks.Ask, field: str | None, param: str | None) -> None:
    error = of_quire(QuireError.of(Reason.BAD_PARAMETER, "why", field=field), ask.names)
    assert error.body["error"]["param"] == param


def test_logprobs_of_an_echo_are_of_the_prompt_too() -> None:
    ask = completion(echo=True, logprobs=2)
    assert (ask.options["logprobs"], ask.options["prompt_logprobs"], ask.top_logprob_count) == (2, 2, 2)
    assert "prompt_logprobs" not in completion(logprobs=2).options
    both = completion(echo=True, logprobs=2, prompt_logprobs=4)
    assert (both.options["prompt_logprobs"], both.top_logprob_count, both.prompt_logprob_count) == (4, 2, 4)
    assert chat(logprobs=True).options["logprobs"] == 0


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [1, "a"], [True], [-1], [2**32], {"a": 1}, None, [[1], "a"]])
def test_prompts_that_are_none_are_refused(prompt: object) -> None:
    with pytest.raises(ValidationError, match="must be a string, an array of token ids, or an array of either"):
        CompletionBody(prompt=prompt)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_error_of_quire_has_a_status(reason: Reason) -> None:
    error = of_quire(QuireError.of(reason, "why"), NAMES)
    assert 400 <= error.status < 600
    assert sorted(error.body["error"]) == ["code", "message", "param", "type"]
    assert ("retry-after" in error.headers) == (error.status in (429, 503))
    is_the_callers = code_of(reason) is InvalidArgumentError.code
    assert not is_the_callers or error.status == 400


def test_credentials_of_the_gateway_are_not_the_callers_to_mend() -> None:
    error = of_quire(QuireError.of(Reason.TOKEN, "this server requires a bearer token"), NAMES)
    assert (error.status, error.body["error"]["message"]) == (
        500,
        "a worker rejected the gateway's credentials: tell the server's operator",
    )


def test_a_refusal_speaks_of_what_its_reader_has_sent_and_of_options_that_there_are() -> None:
    late = of_quire(QuireError.of(Reason.DEADLINE, "it takes longer: raise its --timeout"), NAMES)
    assert (late.status, "--timeout" in late.body["error"]["message"]) == (504, False)
    assert "ask for less at a time" in late.body["error"]["message"]
    names = completion(logprobs=2, echo=True).names
    wrong = of_quire(
        QuireError.of(Reason.BAD_PARAMETER, "prompt_logprobs must be at most 20", field="prompt_logprobs"), names
    )
    assert wrong.body["error"]["message"] == "logprobs must be at most 20"


@pytest.mark.parametrize("kind", [DeadlineExceededError, UnavailableError, InternalError])
def test_what_no_server_of_ours_has_said_is_not_passed_on(kind: type[QuireError]) -> None:
    error = of_quire(kind("10.0.0.5:7071 did not answer: --timeout"), NAMES)
    assert error.status == {DeadlineExceededError: 504, UnavailableError: 503, InternalError: 500}[kind]
    assert not any(word in error.body["error"]["message"] for word in ("10.0.0.5", "--timeout"))


def places(text: str, tokens: list[bytes], *, cuts: tuple[int, ...] = (), is_held: bool = False) -> list[int]:
    """Returns the offsets of tokens in a text. The text comes whole, or in pieces that end between tokens."""
    found, begun = Places(), 0
    offsets = []
    for end in (*cuts, len(tokens)):
        piece = b"".join(tokens[begun:end]).decode(errors="replace") if cuts else text
        found.add(piece, is_held=is_held)
        offsets += [found.of(token) for token in tokens[begun:end]]
        begun = end
    return offsets


def test_an_offset_is_the_place_of_a_token_in_the_text() -> None:
    smile = "\N{GRINNING FACE}".encode()
    tokens = [*(bytes([byte]) for byte in smile), b" The", "\N{SNOWMAN}".encode(), b" for"]
    assert places("\N{GRINNING FACE} The\N{SNOWMAN} for", tokens) == [0, 0, 0, 0, 1, 5, 6]
    for cut in (4, 5, 6):
        assert places("", tokens, cuts=(cut,)) == [0, 0, 0, 0, 1, 5, 6]
    assert places("a\N{REPLACEMENT CHARACTER}bc\N{REPLACEMENT CHARACTER}", [b"a", b"\xe2", b"bc", b"\xff"]) == [
        0,
        1,
        2,
        4,
    ]
    assert places("\N{REPLACEMENT CHARACTER}a", ["\N{REPLACEMENT CHARACTER}".encode(), b"a"]) == [0, 1]


def test_what_the_text_leaves_out_takes_no_place() -> None:
    assert places("the for", [b"<s>", b" the", b" for"]) == [0, 0, 3], "a space that the text does not begin with"
    assert places("x<s>y", [b"<s>", b"x", b"<s>", b"y"]) == [0, 0, 1, 4], "one was put before it, the other was sent"
    assert places("ab", [b"a", b"<end>", b"b", b"<end>"]) == [0, 1, 1, 2]
    assert places("ab", [b"a", b"bcd", b"e"]) == [0, 1, 1], "behind a stop text nothing is in the text"


def test_text_that_may_be_held_back_is_where_it_will_be() -> None:
    found = Places()
    found.add("ab", is_held=True)
    assert [found.of(token) for token in (b"a", b"b", b" sto", b"p it")] == [0, 1, 2, 6]
    found.add(" stop it!", is_held=False)
    assert found.of(b"!") == 10


def test_of_equal_texts_the_likelier_token_is_told() -> None:
    told = [Told(1, -0.5, ((2, -0.1), (1, -0.5))), Told(3, None, ())]
    found = of_completion(told, [{1: b"\xe2", 2: b"\x98", 3: b"ab"}] * 2, [5, 6])
    assert found["tokens"] == ["\N{REPLACEMENT CHARACTER}", "ab"]
    assert orjson.loads(orjson.dumps(found["top_logprobs"])) == [{"\N{REPLACEMENT CHARACTER}": -0.1}, None]
    assert found["text_offset"] == [5, 6]
