"""Reads files as Windows editors write them: a byte order mark first, and lines that end with CR LF."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quire._secret_files import read_token
from quire.cli.model_config import read_config
from quire.cli.prompts import content
from quire_gateway.keys import read_keys
from quire_worker.model.conversation import read_conversation
from quire_worker.model.no_tokenizer import read_tokenizer
from quire_worker.process.chat_template import read_chat_template

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
KEY = "a-key-0123456789abcdef"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Returns the path of a file that a test fills."""
    path = tmp_path / "written"
    path.touch(mode=0o600)
    return path


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\r\n" for line in lines), encoding="utf-8-sig", newline="")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    return path


def test_a_token_is_what_follows_the_mark(written: Path) -> None:
    assert read_token(str(write(written, KEY))) == KEY


def test_keys_are_what_follows_the_mark(written: Path) -> None:
    keys = read_keys(str(write(written, f"{KEY} acme", f"{KEY[::-1]} beta")), {})
    assert keys is not None
    found = [keys.named(f"Bearer {each}".encode()) for each in (KEY, KEY[::-1])]
    assert [each and each.namespace for each in found] == ["acme", "beta"]


def test_messages_are_what_follows_the_mark(written: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert json.loads(content("messages", f"@{write(written, json.dumps(messages))}")) == messages


def test_a_models_config_is_what_follows_the_mark(written: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert read_config(write(written, json.dumps(config))) == config


def test_a_chat_template_writes_no_mark_into_prompts(written: Path) -> None:
    template = read_chat_template(write(written, "{{ messages[0].content }}"), read_tokenizer(DEMO))
    conversation = read_conversation(
        json.dumps([{"role": "user", "content": "Hello"}]), "", "", with_generation_prompt=False
    )
    assert template.text(conversation).strip() == "Hello"  # `strip` would not remove a byte order mark
