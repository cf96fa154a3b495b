"""Tests responses without a process: parsing of bodies, refusals, the order of events, and storage."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from quire_gateway.calls.deltas import CallDelta, Delta, OpenCall
from quire_gateway.continuing import Parting, Said, common_count, continued
from quire_gateway.conversations import Chat
from quire_gateway.failures import ApiError
from quire_gateway.metrics import Telemetry
from quire_gateway.reading import read
from quire_gateway.replies import Answer, Beside, Taken
from quire_gateway.responses.bodies import ResponseBody
from quire_gateway.responses.form import Ended, ResponseForm
from quire_gateway.responses.requests import Asked, of_response
from quire_gateway.responses.store import Store

_CALLS = [Delta(calls=(CallDelta(0, "{", "call_1", "f"),)), Delta(calls=(CallDelta(0, "}"),))]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
NAMELESS = {"type": "function", "parameters": {"type": "object"}}


def asked(earlier: tuple[bytes, ...] = (), **fields: Any) -> Asked:
    return of_response(read(json.dumps({"input": "p", **fields}).encode(), ResponseBody), earlier)


def messages(found: Asked) -> list[Any]:
    (chat,) = found.ask.prompts
    assert isinstance(chat, Chat)
    return [dict(message) for message in chat.messages]


def test_items_become_messages() -> None:
    given = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "o"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"role": "assistant", "content": "u"},
    ]
    first = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    second = {"id": "2", "type": "function", "function": {"name": "f", "arguments": {}}}
    thought = {"reasoning_content": "r", "reasoning": "r"}
    assert messages(asked(input=given, instructions="i")) == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", **thought, "tool_calls": [first, second]},
        {"role": "tool", "tool_call_id": "1", "content": "o"},
        {"role": "assistant", "content": "t"},
        {"role": "assistant", "content": "u"},
    ]


def test_a_response_continues_the_items_of_another_one() -> None:
    first = asked(input="a")
    assert messages(asked(first.items, input="b")) == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]


def test_an_item_refers_once_to_one_of_an_earlier_response() -> None:
    said = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]}
    kept = {"msg_1": orjson.dumps(said)}
    refers = {"type": "item_reference", "id": "msg_1"}
    body = read(json.dumps({"input": [{"role": "user", "content": "a"}, refers]}).encode(), ResponseBody)
    found = of_response(body, (), kept.get)
    assert messages(found) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "t"}]
    assert orjson.loads(found.items[1]) == said
    for items, status, param in (
        ([refers, refers], 400, "input[1].id"),
        ([{**refers, "id": "msg_2"}], 404, "input[0].id"),
    ):
        with pytest.raises(ApiError) as refused:
            of_response(read(json.dumps({"input": items}).encode(), ResponseBody), (), kept.get)
        assert (refused.value.status, refused.value.body["error"]["param"]) == (status, param)


def test_parameters_become_those_of_a_chat() -> None:
    found = asked(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        max_output_tokens=9,
        temperature=0.5,
        seed=3,
        reasoning={"effort": "low"},
        stream=True,
    )
    (chat,) = found.ask.prompts
    assert isinstance(chat, Chat)
    assert chat.variables["reasoning_effort"] == "low"
    assert found.ask.tools
    assert [function.name for function in found.ask.tools.functions] == ["f"]
    assert (found.ask.max_tokens, found.ask.is_streamed, found.ask.options["seed"]) == (9, True, 3)
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert asked(text={"format": form}).ask.options["json_schema"] == schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [NAMELESS]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": ""}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "x", "role": "user"}]}, "input[0].role"),
        ({"input": [{"type": "input_image"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": "", "id": 1}]}, "input[0].id"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "shcema": {}}}}, "text.format.shcema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "very"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        *(({name: value}, name) for name, value in (("n", 2), ("top_logprobs", 1))),
        *(({name: {"id": "x"}}, name) for name in ("conversation", "prompt")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked(**fields)
    told = refused.value.body["error"]
    assert (refused.value.status, told["param"]) == (400, param)
    assert not any(word in told["message"] for word in ("messages", "response_format.", "function.name"))


def form(into: list[Ended]) -> ResponseForm:
    return ResponseForm({"id": "resp_1", "status": "in_progress", "output": []}, into.append)


def test_events_and_the_whole_have_the_same_output() -> None:
    """Pieces of every size give the same items as the whole answer, in order. Each item is opened and closed once."""
    dice = random.Random(7)
    calls = [OpenCall("a" * 9, "f", '{"x": 1}'), OpenCall("b" * 9, "g", "{}")]
    deltas = [Delta(reasoning="thinks "), Delta(reasoning="much"), Delta(content="says "), Delta(content="this")]
    for number, call in enumerate(calls):
        deltas.append(Delta(calls=(CallDelta(number, "", call.call_id, call.function),)))
        deltas += [Delta(calls=(CallDelta(number, letter),)) for letter in call.arguments]
    ended: list[Ended] = []
    streamed, told = form(ended), b""
    told += streamed.opening(0, Beside(prompt_token_ids=(1, 2)))
    for delta in deltas:
        told += streamed.piece(0, delta, None, Beside(token_ids=[dice.randrange(9)]))
    told += streamed.piece(0, Delta(), "tool_calls", Beside()) + streamed.ending(Taken(2, 1, len(deltas), 3))
    form(ended).whole(
        [Answer("says this", "tool_calls", Beside(None, [3], (1, 2)), None, "thinks much", calls)], Taken()
    )
    of_stream, of_whole = [[without_id(item) for item in each.response["output"]] for each in ended]
    assert of_stream == of_whole
    assert [item["type"] for item in of_whole] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["arguments"] for item in of_whole[2:]] == [call.arguments for call in calls]
    assert (len(ended[0].tokens), ended[0].prompt_token_count) == (2 + len(deltas), 2)
    events = [json.loads(block.partition(b"\ndata: ")[2]) for block in told.split(b"\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    opened = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    closed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert opened == [item["id"] for item in closed]
    assert closed == events[-1]["response"]["output"] == ended[0].response["output"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_logprobs_are_those_of_the_tokens_and_come_with_the_text() -> None:
    """As in chats, tokens of reasoning and calls are also reported with the message."""
    deltas = [Delta(reasoning="r"), Delta(), Delta(content="a"), Delta(content="b"), Delta(), *_CALLS]
    ended: list[Ended] = []
    streamed = form(ended)
    told = streamed.opening(0, Beside())
    for number, delta in enumerate(deltas):
        told += streamed.piece(0, delta, None, Beside({"content": [{"token": str(number)}]}))
    told += streamed.ending(Taken())
    events = [json.loads(block.partition(b"\ndata: ")[2]) for block in told.split(b"\n\n")[:-1]]
    of_texts = [event for event in events if event["type"].startswith("response.output_text")]
    assert [[each["token"] for each in event["logprobs"]] for event in of_texts] == [
        ["0", "1", "2"], ["3"], ["0", "1", "2", "3", "4", "5"]
    ]  # fmt: skip
    _, part = (event["part"] for event in events if event["type"] == "response.content_part.done")
    _, message, _ = ended[0].response["output"]
    assert part["logprobs"] == message["content"][0]["logprobs"] == of_texts[-1]["logprobs"]
    everything = {"content": [{"token": str(number)} for number in range(9)]}
    form(ended).whole([Answer("ab", "stop", Beside(everything))], Taken())
    assert ended[1].response["output"][0]["content"][0]["logprobs"] == everything["content"]


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


def test_an_answer_of_nothing_is_an_empty_text_and_one_that_is_cut_says_so() -> None:
    ended: list[Ended] = []
    form(ended).whole([Answer("", "stop", Beside())], Taken())
    form(ended).whole([Answer("a", "length", Beside())], Taken())
    empty, cut = (each.response for each in ended)
    assert (empty["status"], [item["content"][0]["text"] for item in empty["output"]]) == ("completed", [""])
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")


def test_a_stream_that_fails_ends_with_a_response_that_says_why() -> None:
    told = form([]).failed(ApiError(502, "broken", kind="server_error"))
    kinds = [line for line in told.decode().split("\n") if line.startswith("event: ")]
    assert kinds == ["event: response.created", "event: response.in_progress", "event: response.failed"]
    last = json.loads(told.decode().rsplit("data: ", 1)[1])
    assert last["response"]["error"] == {"code": "server_error", "message": "broken"}


def test_a_prompt_begins_with_the_tokens_that_were_said_wherever_the_text_allows_it() -> None:
    """Compares texts of random tokens with the output of a longest-match tokenizer."""
    dice = random.Random(3)
    vocabulary = [b"a", b"b", b"ab", b"ba", b"aab", b"bb"]
    spelled = dict(enumerate(vocabulary))

    def tokenized(text: bytes) -> list[int]:
        found = []
        while text:
            number = max((n for n, token in spelled.items() if text.startswith(token)), key=lambda n: len(spelled[n]))
            found.append(number)
            text = text[len(spelled[number]) :]
        return found

    whole = 0
    for _ in range(500):
        said = [dice.randrange(len(vocabulary)) for _ in range(dice.randrange(12))]
        text = b"".join(spelled[token] for token in said)
        text = text[: dice.choice((len(text), dice.randrange(len(text) + 1)))]
        prompt = tokenized(text + bytes(dice.choice(b"ab") for _ in range(dice.randrange(8))))
        same = common_count(said, prompt)
        theirs, ours = ([spelled[token] for token in part[same:]] for part in (said, prompt))
        found = continued(said, prompt, Parting(same, same), theirs, ours)
        assert b"".join(spelled[token] for token in found) == b"".join(spelled[token] for token in prompt)
        kept = common_count(said, found)
        ends = {len(b"".join(spelled[token] for token in prompt[:index])) for index in range(len(prompt) + 1)}
        written = b"".join(spelled[token] for token in prompt)
        possible = (b"".join(spelled[token] for token in said[:index]) for index in range(len(said) + 1))
        best = max(index for index, begun in enumerate(possible) if written.startswith(begun) and len(begun) in ends)
        assert kept >= best
        whole += kept == len(said)
    assert whole > 100


def response(identity: str, size: int = 0) -> dict[str, Any]:
    return {"id": identity, "output": [{"id": f"msg_{identity}", "type": "message", "text": "x" * size}]}


def test_the_store_forgets_in_time_and_has_no_more_than_its_room() -> None:
    dice, now_s, telemetry = random.Random(5), 0.0, Telemetry()
    store = Store(telemetry, bytes_max=100_000, lifetime_s=50, are_several=True, clock=lambda: now_s)
    kept: dict[tuple[str, str], float] = {}
    for number in range(2_000):
        now_s += dice.random()
        namespace, identity = dice.choice("abc"), f"resp_{dice.randrange(60)}"
        if dice.random() < 0.7:
            body = response(identity, dice.randrange(3_000))
            assert store.put(
                namespace, body, (b"i" * dice.randrange(2_000),), Said("m", [number] * dice.randrange(900), 0, [])
            )
            kept[namespace, identity] = now_s + 50
        else:
            was_there = store.find(namespace, identity) is not None
            assert store.remove(namespace, identity) == was_there
            kept.pop((namespace, identity), None)
        store.check_invariants()
        assert telemetry.stored_bytes <= 100_000
        for (owner, name), expires_s in kept.items():
            found = store.find(owner, name)
            assert found is None or expires_s > now_s
            assert found is None or orjson.loads(found.response)["id"] == name
            item = store.find_item(owner, f"msg_{name}")
            assert (item is None) == (found is None)
            assert found is None or orjson.loads(found.response)["output"] == [orjson.loads(item or b"")]
    now_s += 51
    assert not any(store.find(*key) or store.find_item(key[0], f"msg_{key[1]}") for key in kept)


def test_a_namespace_makes_room_of_its_own_and_sees_no_other() -> None:
    telemetry = Telemetry()
    store = Store(telemetry, bytes_max=40_000, lifetime_s=50, are_several=True)
    assert store.put("quiet", response("resp_q"), ())
    for number in range(100):
        assert store.put("greedy", response(f"resp_{number}", 2_000), ())
    assert store.find("quiet", "resp_q")
    assert store.find("greedy", "resp_q") is None
    assert store.find_item("quiet", "msg_resp_q")
    assert store.find_item("greedy", "msg_resp_q") is None
    assert not store.remove("greedy", "resp_q")
    assert store.find("greedy", "resp_0") is None
    assert store.find("greedy", "resp_99")
    assert not store.put("greedy", response("resp_large", 50_000), ())
    none = Store(Telemetry(), bytes_max=0, lifetime_s=50, are_several=False)
    assert not none.put("", response("resp_1"), ())
