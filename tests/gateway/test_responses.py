"""Tests responses with OpenAI's client, on a gateway in front of a worker and an allocator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from quire.local import LocalStack, ServerProcess

from tests.gateway.scene import DEMO, client, curl
from tests.gateway.test_auto_tools import FORMAT, Scene, scene_of
from tests.gateway.test_tools import WEATHER as CHAT_WEATHER
from tests.gateway.test_tools import check_weather

QUESTION = "The for statement is used to iterate over the elements of a sequence."
BLOCK = 16  # number of tokens in a block of the worker
WEATHER: Any = {"type": "function", **CHAT_WEATHER["function"]}


class State(pydantic.BaseModel):
    """The answer that is expected."""

    kind: Literal["compound", "simple"]
    is_loop: bool


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    with LocalStack(DEMO, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as stack:
        assert stack.gateway is not None
        yield stack.gateway


@pytest.fixture
def ai(served: ServerProcess) -> openai.OpenAI:
    return client(served)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    yield from scene_of("mistral", tmp_path_factory.mktemp("family") / "mistral")


@pytest.fixture(scope="module")
def qwq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    yield from scene_of("qwq", tmp_path_factory.mktemp("family") / "qwq")


def metric(served: ServerProcess, name: str) -> float:
    lines = curl(served, "/metrics").body.decode().splitlines()
    return next(float(line.removeprefix(f"{name} ")) for line in lines if line.startswith(f"{name} "))


def test_a_response_is_created_got_and_deleted(ai: openai.OpenAI, served: ServerProcess) -> None:
    made = ai.responses.create(
        model="demo", input=QUESTION, max_output_tokens=12, temperature=0, metadata={"a": "b"}, extra_body={"seed": 1}
    )
    assert (made.status, made.object, made.model, made.metadata) == ("incomplete", "response", "demo", {"a": "b"})
    assert made.incomplete_details
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output_text
    assert made.usage
    assert (made.usage.output_tokens, made.usage.total_tokens) == (12, made.usage.input_tokens + 12)
    assert made.output[0].to_dict()["status"] == "incomplete"
    chat = ai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], max_tokens=12, temperature=0
    )
    assert made.output_text == chat.choices[0].message.content
    assert ai.responses.retrieve(made.id) == made
    (asked,) = ai.responses.input_items.list(made.id).data
    assert asked.to_dict()["content"] == [{"type": "input_text", "text": QUESTION}]
    stored = metric(served, "quire_gateway_stored_responses")
    ai.responses.delete(made.id)
    assert metric(served, "quire_gateway_stored_responses") == stored - 1
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(made.id)


def test_a_stream_has_the_events_of_openai_and_the_same_response(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "max_output_tokens": 24, "temperature": 0}
    whole = ai.responses.create(**asked)
    found = list(ai.responses.create(**asked, stream=True))
    kinds = [event.type for event in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    told: list[Any] = found
    assert "".join(event.delta for event in told[4:-4]) == told[-4].text == whole.output_text
    assert told[-1].response == ai.responses.retrieve(told[0].response.id)
    with ai.responses.stream(model="demo", input=QUESTION, text_format=State, max_output_tokens=400) as stream:
        assert isinstance(stream.get_final_response().output_parsed, State)


def test_a_text_has_the_format_that_is_asked_for(ai: openai.OpenAI) -> None:
    parsed = ai.responses.parse(model="demo", input=QUESTION, text_format=State, max_output_tokens=400, temperature=0)
    assert isinstance(parsed.output_parsed, State)
    made = ai.responses.create(
        model="demo",
        input=QUESTION,
        text={"format": {"type": "json_schema", "name": "state", "schema": State.model_json_schema()}},
        max_output_tokens=400,
        temperature=0,
    )
    State.model_validate_json(made.output_text)


def test_functions_are_called_and_their_results_are_taken(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "tools": [WEATHER], "max_output_tokens": 200}
    made = ai.responses.create(**asked, tool_choice="required", parallel_tool_calls=False)
    assert made.status == "completed"
    (call,) = made.output
    assert call.type == "function_call"
    check_weather(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    further = ai.responses.create(
        model="demo", previous_response_id=made.id, input=[result], max_output_tokens=8, tool_choice="none"
    )
    assert further.output_text
    items = ai.responses.input_items.list(further.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    by_hand: list[Any] = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
    assert ai.responses.create(model="demo", input=by_hand, max_output_tokens=8).output_text
    named: Any = {"type": "function", "name": "get_weather"}
    told = list(ai.responses.create(**asked, tool_choice=named, stream=True))
    (done,) = [event for event in told if event.type == "response.function_call_arguments.done"]
    check_weather(done.arguments)
    assert done.arguments == "".join(
        event.delta for event in told if event.type == "response.function_call_arguments.delta"
    )


def test_a_turn_computes_its_own_tail_and_at_most_a_block(ai: openai.OpenAI, served: ServerProcess) -> None:
    before = metric(served, 'quire_gateway_continued_responses_total{computed="tail"}')
    said = ai.responses.create(
        model="demo", input=QUESTION * 8, max_output_tokens=100, temperature=1, extra_body={"seed": 5, "top_k": 0}
    )
    assert said.usage
    for turn in range(3):
        following = ai.responses.create(
            model="demo",
            previous_response_id=said.id,
            input="What is a sequence?",
            max_output_tokens=70,
            extra_body={"seed": turn, "top_k": 0},
        )
        assert said.usage
        assert following.usage
        prompt, cached = following.usage.input_tokens, following.usage.input_tokens_details.cached_tokens
        tail = prompt - (said.usage.input_tokens + said.usage.output_tokens)
        assert 0 < tail < 24, "the tail is the question"
        assert prompt - cached <= tail + BLOCK
        said = following
    assert metric(served, 'quire_gateway_continued_responses_total{computed="tail"}') == before + 3


def test_so_does_one_behind_answers_that_their_tokenizer_would_split_in_another_way(ai: openai.OpenAI) -> None:
    said = ai.responses.create(model="demo", input="The for statement. " * 16, max_output_tokens=100, temperature=0)
    for _ in range(3):
        following = ai.responses.create(
            model="demo", previous_response_id=said.id, input="And then?", max_output_tokens=100, temperature=0
        )
        assert said.usage
        assert following.usage
        prompt, cached = following.usage.input_tokens, following.usage.input_tokens_details.cached_tokens
        tail = prompt - (said.usage.input_tokens + said.usage.output_tokens)
        assert prompt - cached <= tail + BLOCK
        said = following


def test_instructions_are_of_their_own_response(ai: openai.OpenAI) -> None:
    first = ai.responses.create(model="demo", instructions="Be short.", input=QUESTION, max_output_tokens=4)
    second = ai.responses.create(model="demo", previous_response_id=first.id, input="Go on.", max_output_tokens=4)
    assert (first.instructions, second.instructions) == ("Be short.", None)
    items = ai.responses.input_items.list(second.id, order="asc").data
    assert [item.to_dict()["role"] for item in items] == ["user", "assistant", "user"]


def test_the_tokens_of_a_prompt_are_counted_as_its_response_has_them(ai: openai.OpenAI) -> None:
    def is_counted(**asked: Any) -> openai.types.responses.Response:
        made = ai.responses.create(model="demo", **asked, max_output_tokens=8)
        counted = ai.responses.input_tokens.count(model="demo", **asked)
        assert made.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
        return made

    first = is_counted(input=QUESTION, instructions="The import statement.", tools=[WEATHER], tool_choice="required")
    is_counted(input="The while", previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError) as unknown:
        ai.responses.input_tokens.count(model="demo", input=QUESTION, previous_response_id="resp_other")
    assert unknown.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as of_answers:
        ai.responses.input_tokens.count(model="demo", input=QUESTION, extra_body={"temperature": 1})
    assert of_answers.value.param == "temperature"


def test_what_is_not_stored_is_not_found(ai: openai.OpenAI) -> None:
    made = ai.responses.create(model="demo", input=QUESTION, max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as refused:
        ai.responses.create(model="demo", previous_response_id=made.id, input="Go on.")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_response_in_the_background_is_asked_for_and_cancelled(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "background": True}
    made = ai.responses.create(**asked, max_output_tokens=4)
    assert (made.status, made.background) == ("in_progress", True)
    while made.status == "in_progress":
        made = ai.responses.retrieve(made.id)
    assert (made.status, bool(made.output_text)) == ("incomplete", True)
    assert ai.responses.cancel(made.id) == made
    long = ai.responses.create(**asked, max_output_tokens=3_000, extra_body={"ignore_eos": True})
    assert ai.responses.cancel(long.id).status == "cancelled"
    assert ai.responses.retrieve(long.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        ai.responses.create(model="demo", input="Go on.", previous_response_id=long.id)
    waited = ai.responses.create(model="demo", input=QUESTION, max_output_tokens=4)
    with pytest.raises(openai.BadRequestError):
        ai.responses.cancel(waited.id)


def test_logprobs_are_those_of_a_chat_whole_and_streamed(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "max_output_tokens": 8, "temperature": 0}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    chat = ai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs
    expected = [each.model_dump() for each in chat.choices[0].logprobs.content or ()]
    made = ai.responses.create(**asked)
    told = list(ai.responses.create(**asked, stream=True))
    assert made.top_logprobs == 2
    assert [each["token"] for each in logprobs_of(made.output)] == [each["token"] for each in expected]
    pieces = [
        piece.to_dict() for event in told if event.type == "response.output_text.delta" for piece in event.logprobs
    ]
    assert pieces == logprobs_of(told[-1].response.output)
    for one, other, third in zip(logprobs_of(made.output), expected, pieces, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert third["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert len(one["top_logprobs"]) == 2


def logprobs_of(output: Any) -> list[Any]:
    """Returns the logprobs of the only message."""
    ((part,),) = [item.to_dict()["content"] for item in output]
    return list(part["logprobs"])


def test_an_item_refers_to_one_of_an_earlier_answer(ai: openai.OpenAI) -> None:
    """Vercel's ai package sends a conversation with stored responses like this."""
    first = ai.responses.create(model="demo", input=QUESTION, max_output_tokens=6, temperature=0)
    before: Any = {"role": "user", "content": QUESTION}
    after: Any = {"role": "user", "content": "And then?"}
    refers: Any = {"type": "item_reference", "id": first.output[0].id}
    by_text, by_id = (
        ai.responses.create(model="demo", input=[before, said, after], max_output_tokens=6, temperature=0)
        for said in ({"role": "assistant", "content": first.output_text}, refers)
    )
    assert (by_id.output_text, by_id.usage and by_id.usage.input_tokens) == (
        by_text.output_text,
        by_text.usage and by_text.usage.input_tokens,
    )
    ai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        ai.responses.create(model="demo", input=[before, refers, after])


def test_pages_of_input_items(ai: openai.OpenAI) -> None:
    texts: list[Any] = [{"role": "user", "content": str(number)} for number in range(5)]
    made = ai.responses.create(model="demo", input=texts, max_output_tokens=2)
    found = [item.to_dict()["content"] for item in ai.responses.input_items.list(made.id, limit=2, order="asc")]
    assert found == [[{"type": "input_text", "text": str(number)}] for number in range(5)]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_is_an_item_before_the_text(qwq: Scene, *, is_streamed: bool) -> None:
    asked: dict[str, Any] = {
        "model": qwq.name,
        "input": QUESTION,
        "max_output_tokens": 100,
        "text": {"format": {"type": "json_schema", "name": "state", "schema": FORMAT["json_schema"]["schema"]}},
        "extra_body": {**qwq.biased("</think>"), "min_tokens": 3, "seed": 1},
    }
    if is_streamed:
        *told, last = qwq.ai.responses.create(**asked, stream=True)
        made = last.response
        thought = "".join(event.delta for event in told if event.type == "response.reasoning_text.delta")
    else:
        made = qwq.ai.responses.create(**asked)
        thought = made.output[0].content[0].text if made.output[0].type == "reasoning" else ""
    assert list(json.loads(made.output_text)) == ["ready"]
    assert made.usage.output_tokens_details.reasoning_tokens >= 1
    if made.output[0].type == "reasoning":
        assert made.output[0].content[0].text == thought
    cut = qwq.ai.responses.create(**{**asked, "extra_body": {}, "max_output_tokens": 8})
    assert [item.type for item in cut.output] == ["reasoning"]
    assert cut.output[0].content[0].text
    assert qwq.ai.responses.create(model=qwq.name, previous_response_id=cut.id, input="Go on.", max_output_tokens=4)


def test_a_model_calls_functions_in_its_own_notation(mistral: Scene) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": 250, "parallel_tool_calls": False}
    made = mistral.ai.responses.create(
        model=mistral.name, input=QUESTION, extra_body={**mistral.biased("[TOOL_CALLS]"), "seed": 3}, **asked
    )
    (call,) = made.output
    assert call.type == "function_call"
    check_weather(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    further = mistral.ai.responses.create(
        model=mistral.name, previous_response_id=made.id, input=[result], **{**asked, "max_output_tokens": 8}
    )
    assert further.usage
    assert made.usage
    assert further.usage.input_tokens_details.cached_tokens >= made.usage.input_tokens - BLOCK
