"""The recordings in conformance/ are current and complete, Python's owner agrees with them, and mistakes are
noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from quire.v1 import allocator_pb2 as pb

CONFORMANCE = Path(__file__).resolve().parent.parent / "conformance"
LINES = [
    json.loads(line) for path in sorted((CONFORMANCE / "sessions").iterdir()) for line in path.read_text().splitlines()
]
# This program runs Python's owner, but replaces one line of the owner's answers.
MISTAKEN = """
import json, sys
sys.path.insert(0, sys.argv[1])
from owner import Owner
owner = Owner()
for line in sys.stdin:
    asked = json.loads(line)
    answer = owner.answer(asked)
    exec(sys.argv[2])
    print(json.dumps(answer), flush=True)
"""
MISTAKES = {
    "a wrong hash": ("'hash' in asked and answer['digests'].reverse()", "hashes.json: hash 'Plain': digests"),
    "a wrong root": ("'hash' in asked and answer.pop('root')", "root is None"),
    "a wrong digest of a state": ("'state' in asked and answer.update(digest='00')", "states.json: state 'number 0'"),
    "a sequence that is not freed": (
        "'step' in asked and asked['step'].get('frees') and answer.update(digest='00')",
        "the digest is 00, and must be",
    ),
    "a report without sequences": (
        "[chunk.pop('sequences', 0) for chunk in answer.get('chunks', [])]",
        "sequences of the report are {}",
    ),
    "a report in another order of frees": (
        "[chunk.pop('freedBlocks', 0) and [chunk.pop(k) for k in ('freedSteps', 'freedOperations', 'freedPositions')]"
        " for chunk in answer.get('chunks', [])]",
        "freed blocks of the report are []",
    ),
    "an error": ("answer = {'error': 'not made yet'}", "not made yet"),
    "another end": ("sys.exit()", "the process has ended"),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CONFORMANCE / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_the_recordings_are_fresh() -> None:
    command = [sys.executable, str(CONFORMANCE / "record.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr


def test_the_recordings_are_small() -> None:
    assert sum(path.stat().st_size for path in CONFORMANCE.rglob("*.json*")) < 700_000


def fields_in(message: Any) -> set[str]:
    """Returns the names of the fields that are set in a message and in messages inside it."""
    found = set()
    for field, value in message.ListFields():
        found.add(f"{message.DESCRIPTOR.name}.{field.name}")
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                found |= fields_in(each)
    return found


def fields_of(descriptor: Any) -> set[str]:
    """Returns the names of all fields that a message and messages inside it may have."""
    found = {f"{descriptor.name}.{field.name}" for field in descriptor.fields}
    return found.union(
        *(fields_of(field.message_type) for field in descriptor.fields if field.message_type is not None)
    )


def test_the_sessions_have_every_field_of_steps_replies_and_reports() -> None:
    recorded = set()
    for line in LINES:
        if "step" in line:
            recorded |= fields_in(ParseDict(line["step"], pb.Step()))
            recorded |= fields_in(ParseDict(line["reply"], pb.StepReply()))
        if "report" in line:
            recorded |= fields_in(ParseDict(line["report"]["end"], pb.ReportEnd()))
            for chunk in line["report"]["chunks"]:
                recorded |= fields_in(ParseDict(chunk, pb.ReportChunk()))
    for message in (pb.Step, pb.StepReply, pb.ReportChunk, pb.ReportEnd):
        assert fields_of(message.DESCRIPTOR) - recorded == set()


@pytest.mark.parametrize(("level", "files"), [(0, 1), (1, 13), (2, 13)])
def test_pythons_own_owner_agrees_with_the_recordings(level: int, files: int) -> None:
    result = run("--level", str(level))
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == files
    assert ("2 reports" in result.stdout) == (level == 2)


@pytest.mark.parametrize(("mistake", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_noticed_and_named(mistake: str, said: str) -> None:
    result = run("--", sys.executable, "-c", MISTAKEN, str(CONFORMANCE), mistake)
    assert result.returncode == 1
    assert said in result.stdout
    assert not result.stderr.count("Traceback (most recent call last)")
