"""With --served-model-name a worker names its model: requests may use each name, and answers have the first name."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from quire import AsyncClient, Client
from quire._transport.messages import worker_status
from quire.local import LocalStack, ServerProcess
from quire.v1 import worker_pb2 as pb
from quire_gateway.fleet import Fleet
from quire_worker.process.options import MODEL_NAMES_MAX, parse_arguments

from tests.gateway.scene import DEMO, client, curl

NAMES = ["chat", "acme/chat-large", "latest"]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    arguments = ["--blocks", "256", "--served-model-name", *NAMES]
    with LocalStack(DEMO, worker_arguments=arguments, gateway_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> ServerProcess:
    assert stack.gateway is not None
    return stack.gateway


def test_each_name_is_listed_and_found_and_its_root_is_the_first(served: ServerProcess) -> None:
    ai = client(served)
    listed = [model.model_dump() for model in ai.models.list().data]
    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        (name, "chat", None) for name in NAMES[:1] + sorted(NAMES[1:])
    ]
    for model in listed:
        assert ai.models.retrieve(model["id"]).model_dump() == model
    with pytest.raises(openai.NotFoundError, match="'demo' does not exist"):
        ai.models.retrieve("demo")


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_has_the_first_name_whatever_the_request_says(served: ServerProcess, name: str) -> None:
    ai = client(served)
    assert ai.completions.create(model=name, prompt="The for statement", max_tokens=2).model == "chat"
    streamed = ai.completions.create(model=name, prompt="The for statement", max_tokens=2, stream=True)
    assert {event.model for event in streamed} == {"chat"}
    assert ai.responses.create(model=name, input="The for statement", max_output_tokens=2).model == "chat"
    assert curl(served, "/tokenize", body={"model": name, "prompt": "The for"}).status == 200
    branch = json.loads(curl(served, "/v1/branches", body={"model": "latest", "prompt": "The for statement"}).body)
    assert branch["model"] == "chat"
    answer = curl(served, f"/v1/branches/{branch['id']}/generate", body={"model": name, "max_tokens": 2})
    assert (answer.status, json.loads(answer.body)["model"]) == (200, "chat")


def test_a_branch_of_another_model_is_refused_by_its_name(served: ServerProcess) -> None:
    branch = json.loads(curl(served, "/v1/branches", body={"model": "chat", "prompt": "The for statement"}).body)
    refused = curl(served, f"/v1/branches/{branch['id']}/generate", body={"model": "demo", "max_tokens": 2})
    assert (refused.status, refused.error["param"]) == (400, "model")


def test_a_status_has_all_names(stack: LocalStack) -> None:
    with Client(stack.worker_address) as worker:
        status = worker.status()
    assert [status.model, *status.model_aliases] == NAMES


async def test_a_name_of_several_is_the_checkpoint_s_then_the_adapter_s_then_an_alias() -> None:
    fleet = Fleet([AsyncClient("127.0.0.1:1") for _ in range(2)], [])
    for backend, model, aliases in zip(fleet.backends, ("b", "a"), (["a", "tuned", "z"], ["y", "z"]), strict=True):
        backend.heard(worker_status(pb.GetStatusResponse(model=model, model_aliases=aliases, sequence_tokens_max=9)))
    fleet.backends[0].adapters = {"tuned": bytes(32)}
    found = {name: (model.name, model.base, model.adapter) for name, model in fleet.served().items()}
    assert list(found) == ["a", "b", "tuned", "y", "z"]
    assert found["a"] == ("a", "a", "")
    assert found["tuned"] == ("tuned", "b", "tuned")
    assert found["z"] == found["y"] == found["a"]
    assert fleet.model(None) == fleet.model("a")
    await fleet.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--served-model-name", "a", "b", "a"], "at most 16 different names"),
        (["--served-model-name", *map(str, range(MODEL_NAMES_MAX + 1))], "at most 16 different names, not 17"),
        (["--served-model-name", "a b"], "'a b' is not a valid name of a model"),
        (["--served-model-name", "x" * 129], "is not a valid name of a model: use 1 to 128 letters"),
        (
            ["--served-model-name", "a", "b", "--adapter", "b=folder"],
            "--adapter b: the model itself has that name",
        ),
    ],
    ids=["twice", "many", "a space", "long", "an adapter"],
)
def test_names_that_cannot_be_are_refused_at_the_start(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--model", str(DEMO), *arguments])
    assert said in capsys.readouterr().err
