"""Checks an owner in any language against the recordings beside this file.

    python conformance/run.py                                 # Python's own owner
    python conformance/run.py --level 1 -- node build/typescript/dist/conformance.js

The command reads a line of JSON from standard input and writes one to standard output, until its input ends. Numbers of
64 bits are strings, digests of `hash` and `state` hexadecimal; `spec`, `step`, `reply`, `chunks` and `end` are messages
of protos/quire/v1/allocator.proto in protobuf's JSON.

    {"hash": {fingerprint, layout, adapter, namespace,        {"root": HEX, "digests": [HEX, ...]}
              block_size, tokens, extra_keys}}
    {"state": {sequences, after_step}}                        {"digest": HEX}, of a part where after_step is not 0
    {"spec": PoolSpec}                                        {"digest": HEX}: a new, empty pool
    {"step": Step, "reply": StepReply}                        {"digest": HEX}: the whole state after it
    {"report": {}}                                            {"chunks": [ReportChunk, ...], "end": ReportEnd}

Level 0 asks for hashes, level 1 also for states and steps, level 2 also for reports. A report may be cut into other
chunks, and unordered parts may come in another order. The answer `{"error": TEXT}` counts as wrong. Exit status: 0 if
all answers are right.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import ParseDict
from quire.protocol.packing import unpack_uint32
from quire.v1 import allocator_pb2 as pb

HERE: Final = Path(__file__).resolve().parent
DIGEST_BYTES: Final = 32
# File name -> (request to send for each vector, fields of the vector that the answer must equal).
VECTORS: Final = {"hashes.json": ("hash", ("root", "digests")), "states.json": ("state", ("digest",))}

Line = dict[str, Any]


class WrongError(Exception):
    """An answer is wrong or missing."""


class Implementation:
    """An owner as a process that answers line by line. Leaving the `with` block kills it."""

    def __init__(self, command: list[str], timeout_s: float) -> None:
        self._timeout_s, self._has_ended = timeout_s, False
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines = queue.SimpleQueue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Implementation:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, asked: Line) -> Line:
        """Returns the process's answer to one line; raises WrongError without an answer."""
        assert self._process.stdin is not None
        if self._has_ended:
            raise WrongError("the process has ended")
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=self._timeout_s)
            answer = json.loads(line) if line else None
        except queue.Empty:
            raise WrongError(f"no answer within {self._timeout_s:g} s") from None
        except OSError:
            answer = None
        except json.JSONDecodeError:
            raise WrongError(f"the answer is not JSON: {line.strip():.200}") from None
        if answer is None:
            self._has_ended = True
            raise WrongError("the process has ended")
        if not isinstance(answer, dict) or "error" in answer:
            raise WrongError(f"the answer is {json.dumps(answer):.200}")
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


def check_vectors(owner: Implementation, path: Path) -> int:
    """Checks every vector of a file, and returns their number."""
    vectors = json.loads(path.read_text())
    name, answers = VECTORS[path.name]
    for number, vector in enumerate(vectors):
        answer = owner.ask({name: {key: value for key, value in vector.items() if key not in answers}})
        for key in answers:
            if answer.get(key) != vector[key]:
                title = vector.get("title", f"number {number}")
                raise WrongError(f"{name} {title!r}: {key} is {answer.get(key)}, and must be {vector[key]}")
    return len(vectors)


def check_session(owner: Implementation, path: Path, *, with_reports: bool) -> tuple[int, int]:
    """Plays a session, and returns the numbers of its steps and reports."""
    steps = reports = 0
    for number, text in enumerate(path.read_text().splitlines(), 1):
        line = json.loads(text)
        where = f"{path.name}, line {number}"
        if "spec" in line:
            owner.ask(line)
        elif "step" in line:
            steps += 1
            answer = owner.ask({"step": line["step"], "reply": line["reply"]})
            if answer.get("digest") != line["digest"]:
                expected = f"{line['digest']}, of this state: {state_after(path, number)}"
                raise WrongError(f"{where}: the digest is {answer.get('digest')}, and must be {expected}")
        elif with_reports:
            reports += 1
            told, meant = canonical(owner.ask({"report": {}})), canonical(line["report"])
            for part, value in told.items():
                if value != meant[part]:
                    raise WrongError(f"{where}: {part} of the report are {value}, and must be {meant[part]}")
    return steps, reports


def state_after(path: Path, line_count: int) -> str:
    """Returns the state of Python's owner after `line_count` lines of a session, as JSON."""
    from owner import Owner

    known = Owner()
    for text in path.read_text().splitlines()[:line_count]:
        known.answer(json.loads(text))
    names = ("id", "token_count", "committed_token_count", "namespace")
    rows = known.ledger.rows()
    return json.dumps(
        [{**dict(zip(names, row, strict=False)), "tables": [table.tolist() for table in row[4]]} for row in rows]
    )


def canonical(report: Line) -> dict[str, Any]:
    """Returns a report's content, however it is cut: sequences, published blocks, the order of frees, and its end."""
    sequences: dict[int, list[Any]] = {}
    published: set[tuple[Any, ...]] = set()
    freed: list[tuple[int, ...]] = []
    for message in report["chunks"]:
        chunk = ParseDict(message, pb.ReportChunk())
        for each in chunk.sequences:
            tables = [unpack_uint32(table.blocks).tolist() for table in each.tables]
            known = sequences.setdefault(each.sequence_id, [chunk.namespaces[each.namespace], [[] for _ in tables], []])
            for table, more in zip(known[1], tables, strict=True):
                table.extend(more)
            known[2] = [each.token_count, each.committed_token_count, each.priority]
            known[2] += [each.prompt_token_count, each.chunk_token_count, list(each.stops)]
        for prefix in chunk.prefixes:
            parent, scope = prefix.parent_digest, (chunk.namespaces[prefix.namespace], prefix.group)
            for index, block in enumerate(unpack_uint32(prefix.blocks)):
                digest = prefix.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
                published.add((*scope, prefix.first_position + index, parent.hex(), digest.hex(), block))
                parent = digest
        columns = (chunk.freed_steps, chunk.freed_operations, chunk.freed_positions)
        freed += zip(*columns, unpack_uint32(chunk.freed_blocks), strict=True)
    end = ParseDict(report["end"], pb.ReportEnd())
    return {
        "sequences": sequences,
        "published blocks": sorted(published),
        "freed blocks": [(*entry[:2], entry[3]) for entry in sorted(freed)],
        "numbers of the end": (end.last_step, end.last_sequence_id),
    }


def main() -> int:
    """Checks the owner of the command line; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--level", type=int, choices=(0, 1, 2), default=2, help="level of the checks to run (default: 2)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for an answer (default: 60)")
    parser.add_argument("command", nargs="*", help="an owner (default: Python's own)")
    options = parser.parse_args()
    paths = [HERE / "hashes.json"]
    if options.level:
        paths += [HERE / "states.json", *sorted((HERE / "sessions").glob("*.jsonl"))]
    wrong = 0
    with Implementation(options.command or [sys.executable, str(HERE / "owner.py")], options.timeout) as owner:
        for path in paths:
            name = path.relative_to(HERE)
            try:
                if path.name in VECTORS:
                    print(f"ok     {name}: {check_vectors(owner, path)} vectors")
                else:
                    steps, reports = check_session(owner, path, with_reports=options.level > 1)
                    print(f"ok     {name}: {steps} steps, {reports} reports")
            except WrongError as error:
                wrong += 1
                print(f"WRONG  {name}: {error}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
