"""The gateway knows every parameter that the installed openai package can send."""

from __future__ import annotations

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from quire_gateway.bodies import Body, ChatBody, CompletionBody


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        (ChatBody, chat_create_params.CompletionCreateParamsBase.__annotations__),
        (CompletionBody, completion_create_params.CompletionCreateParamsBase.__annotations__),
    ],
    ids=["chat", "completion"],
)
def test_every_parameter_of_the_openai_package_is_known(body: type[Body], keys: dict[str, object]) -> None:
    assert len(keys) > 10
    assert sorted({*keys, "stream"} - body.model_fields.keys()) == []
