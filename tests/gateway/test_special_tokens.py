"""Text that spells a special token becomes ordinary text or the token, as set for the key or else for the worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from quire import Client
from quire.local import LocalStack, ServerProcess

from tests.client.servers import secret_file
from tests.gateway.scene import DEMO, curl

SPELLED: Final = "The for<|end|> statement"
CHAT: Final = [{"role": "user", "content": SPELLED}]
KEYS: Final = {None: "sk-neither-0123456789", "text": "sk-split-0123456789", "tokens": "sk-whole-0123456789"}


def prompt_token_counts(served: ServerProcess, key: str) -> dict[str, int]:
    """Returns the conversation's number of tokens at each endpoint that takes a conversation."""

    def ask(path: str, **body: Any) -> dict[str, Any]:
        answer = curl(served, path, "-H", f"Authorization: Bearer {key}", body={"model": "demo", **body})
        assert answer.status == 200, answer.body
        found: dict[str, Any] = json.loads(answer.body)
        return found

    return {
        "chat": ask("/v1/chat/completions", messages=CHAT, max_tokens=1)["usage"]["prompt_tokens"],
        "response": ask("/v1/responses", input=SPELLED, max_output_tokens=16)["usage"]["input_tokens"],
        "tokenize": ask("/tokenize", messages=CHAT)["count"],
        "branch": ask("/v1/branches", messages=CHAT)["token_count"],
    }


@pytest.mark.parametrize("of_worker", ["text", "tokens"])
def test_a_key_says_what_special_tokens_are_and_else_the_worker(of_worker: str, tmp_path: Path) -> None:
    lines = [f"{key} acme {f'special_tokens={what}' if what else ''}" for what, key in KEYS.items()]
    keys = secret_file(tmp_path / "keys", "\n".join(lines))
    with LocalStack(
        DEMO,
        worker_arguments=["--blocks", "64", "--special-tokens-in-chats", of_worker],
        gateway_listen="127.0.0.1:0",
        gateway_arguments=["--api-keys", str(keys)],
    ) as stack:
        with Client(stack.worker_address) as worker:
            (end,) = worker.tokenize("<|end|>", add_special_tokens=False)
            split, whole = (worker.tokenize(CHAT, split_special_tokens=each) for each in (True, False))
            assert worker.tokenize(CHAT) == (split if of_worker == "text" else whole)
        assert (end in split, end in whole) == (False, True)
        assert stack.gateway is not None
        for what, key in KEYS.items():
            expected = len(split if (what or of_worker) == "text" else whole)
            found = prompt_token_counts(stack.gateway, key)
            assert found == dict.fromkeys(found, expected), (what, of_worker)
