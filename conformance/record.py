"""Records the material that `run.py` checks owners with: sessions of the simulation, and vectors of digests.

    python conformance/record.py            # writes sessions/*.jsonl, hashes.json and states.json beside this file
    python conformance/record.py --check    # compares instead; names outdated files and exits with status 1

A session is one owner's life in a simulation with faults. It has every step with the answer that was applied, the
digest of the state after it, and the reports that allocators asked for. One more session follows a script: priorities,
wishes, and mistakes that no simulated owner makes. It needs a clone, because the simulation is part of the tests.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any, Final
from unittest import mock

from google.protobuf.json_format import MessageToDict
from quire.hashing import block_digests
from quire.protocol.features import TELLS_REMOVED
from quire.protocol.outcomes import NULL_BLOCK
from quire.protocol.state_digest import STATE_DIGEST_ENTRIES_MAX, SequenceRow, in_turn, state_digest
from quire.protocol.steps import StepBuilder
from quire.session.block_report import report_chunks, report_end
from quire.session.owner import PoolOwner
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits

HERE: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.client.test_hashing import VECTORS  # noqa: E402
from tests.simulation.histories import APPEND_ONLY, GROUPS, ROOT, pool_spec  # noqa: E402
from tests.simulation.simulation import FAULTS, Simulation  # noqa: E402
from tests.simulation.world import POOL, Allocator, Clock, Link, Worker  # noqa: E402

EVENTS: Final = 50  # events that the simulation runs between two checks whether the session has all its steps
STEPS: Final = 66  # steps of a session; the answer to step 64 has a digest
REPORTS: Final = 2  # number of a session's reports after the first report, which is empty
REPORTED: Final = (5, 8)  # numbers of the scripted session's steps that a report follows
FAULT_RATE: Final = 0.12
SEED: Final = 37
LARGE: Final = 100  # With more sequences than this, a digest covers only a part of the state.

Line = dict[str, Any]


class RecordedWorker(Worker):
    """A worker that records the messages that it receives.

    Attributes:
        lines: the lines of its session so far.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lines: list[Line] = []
        self._reports = 0

    def receive(self) -> None:
        """Receives the oldest message. Records the step that it answers, or the report that it asks for."""
        owner = self.owner
        asked, answered, reported = list(owner._unanswered), self.answered, owner.report_count
        message = self.link.to_client[0] if self.link is not None else None
        super().receive()
        if self.answered > answered and isinstance(message, bytes):
            self.lines.append(_answered(owner, asked[0].step.SerializeToString(), message))
        elif owner.report_count > reported and self.answered and self._reports < REPORTS:
            self._reports += 1
            self.lines.append({"report": _report(owner)})


def _answered(owner: PoolOwner, asked: bytes, answer: bytes) -> Line:
    """Returns the line of a step whose answer was just applied."""
    step, reply = pb.Step.FromString(asked), pb.SessionReply.FromString(answer).step_reply
    return {"step": MessageToDict(step), "reply": MessageToDict(reply), "digest": owner.ledger.digest().hex()}


def _report(owner: PoolOwner) -> Line:
    """Returns the report of an owner's ledger, in the small chunks of the simulation if it runs."""
    chunks = report_chunks(owner.ledger)
    end = report_end(chunks, last_step=owner.last_step, last_sequence_id=owner.ledger.last_sequence_id)
    return {"chunks": [MessageToDict(chunk) for chunk in chunks], "end": MessageToDict(end)}


class RecordedSimulation(Simulation):
    """A simulation whose workers record the messages that they receive."""

    def _new_worker(self) -> Worker:
        return RecordedWorker(self.spec, self.rng, self.clock, self.outcome.counts, self.window)


def session(kinds: str, seed: int) -> list[Line]:
    """Returns a session with a pool of these groups. The first line is the pool's specification."""
    with mock.patch.dict(FAULTS, {"worker crashes": 0}):  # The session must have one worker from start to end.
        simulation = RecordedSimulation(seed, kinds=kinds, fault_rate=FAULT_RATE)
        worker = simulation.worker
        assert isinstance(worker, RecordedWorker)
        steps: list[int] = []
        while len(steps) < STEPS:
            violation = simulation.run(EVENTS).violation
            if violation:
                raise RuntimeError(f"{kinds}, seed {seed}: {violation}")
            steps = [index for index, line in enumerate(worker.lines) if "step" in line]
    return [{"spec": MessageToDict(simulation.spec)}, *worker.lines[: steps[STEPS - 1] + 1]]


def scripted() -> list[Line]:
    """Returns a session with priorities, wishes and mistakes. Answers name only one removed digest each."""
    spec = pool_spec("full", 12, features=[TELLS_REMOVED])
    owner = PoolOwner(POOL, spec, incarnation=bytes(16), window=1)
    link = Link(Allocator("A1", random.Random(SEED)), Clock())
    lines: list[Line] = [{"spec": MessageToDict(spec)}]
    owner.attach()
    with mock.patch.object(limits, "REMOVED_TOLD_MAX", 1):
        _exchange(owner, link)
        for number, step in enumerate(_script(), 1):
            owner.submit(step)
            (asked,), answer = list(owner._unanswered), _exchange(owner, link)
            lines.append(_answered(owner, asked.step.SerializeToString(), answer))
            if number in REPORTED:
                lines.append({"report": _report(owner)})
    return lines


def _script() -> list[StepBuilder]:
    """Returns the steps of the scripted session, in blocks of 4 tokens."""
    first, second = block_digests(ROOT, range(20), 4), block_digests(ROOT, range(100, 120), 4)
    return [
        StepBuilder().allocate(1, 10, first[:2], priority=3).allocate(2, 9, second[:2], "tenant"),
        # Sequence 1 is computing the same prefix, so sequence 3 is PENDING. Sequence 4 does not wait for it.
        StepBuilder().allocate(3, 9, first[:2], defer_token_count=4).allocate(4, 5, first[:1], priority=-1),
        # One commit names sequence 77, which is not live. The last commit exceeds the granted tokens.
        StepBuilder().commit(1, 8, first[:2]).commit(77, 4, first[:1]).commit(2, 12, second[:3]),
        StepBuilder().commit(2, 9, second[:2], keep_token_count=9).commit(4, 4, first[:1]).free(88),
        # Sequence 4 was preempted, and returns as sequence 5. Freeing sequence 4 keeps one block cached for a minute.
        StepBuilder()
        .free(4, keep_ms=60_000, keep_token_count=4)
        .allocate(5, 7, first[:1], is_return=True, priority=-1),
        StepBuilder().free(1).free(2, keep_ms=1_000).free(1).fork(5, 6).fork(99, 7),
        # A prompt of the whole pool evicts all that is cached.
        StepBuilder().free(5).free(6).allocate(8, 44, b"", priority=7),
        StepBuilder()
        .grow(8, 49)
        .allocate(9, 12, second[:2], "tenant", priority=2, prompt_token_count=13, breakpoints=(4, 8)),
    ]


def _exchange(owner: PoolOwner, link: Link) -> bytes:
    """Delivers all messages of both sides. Returns the last one of the allocator."""
    answer = b""
    while owner.outbox:
        link.to_server.append(owner.outbox.popleft().SerializeToString())
        link.deliver_to_server()
        while link.to_client:
            message = link.to_client.popleft()
            assert isinstance(message, bytes), message
            answer = message
            owner.receive(packed.SessionReply.FromString(answer))
    return answer


def states() -> list[Line]:
    """Returns states and their digests, of whole states and of the parts that the answers to some steps cover."""
    rng, found = random.Random(SEED), []
    for count, group_count, step in ((0, 1, 0), (1, 1, 0), (3, 2, 0), (5, 1, 64), (200, 1, 128), (200, 1, 6400)):
        spread = 1 if count > LARGE else 2**40 + 1  # Higher ids take several bytes.
        rows = [_row(rng, number, spread, group_count) for number in range(count)]
        turn = [rows[at] for at in in_turn(range(count), step)] if step else rows
        digest = state_digest(turn, STATE_DIGEST_ENTRIES_MAX if step else None)
        names = ("id", "token_count", "committed_token_count", "namespace")
        sequences = [
            {**dict(zip(names, (str(row[0]), *row[1:4]), strict=True)), "tables": [table.tolist() for table in row[4]]}
            for row in rows
        ]
        found.append({"sequences": sequences, "after_step": step, "digest": digest.hex()})
    return found


def _row(rng: random.Random, number: int, spread: int, group_count: int) -> SequenceRow:
    """Returns a sequence with random numbers. Every second sequence has a namespace with non-ASCII characters."""
    tables = [array("I", [rng.choice((NULL_BLOCK, rng.randrange(99)))] * rng.randrange(3)) for _ in range(group_count)]
    namespace = "" if number % 2 else "équipe"
    return (number + 1) * spread, rng.randrange(spread % 2**32 + 63), rng.randrange(64), namespace, tables


def hashes() -> list[Line]:
    """Returns the vectors of docs/hash.md, with their extra keys and digests as lists."""
    found: list[Line] = []
    for title, vector in VECTORS.items():
        size, tokens = int(vector["block_size"]), [int(token) for token in vector["tokens"].split()]
        keys = [
            ["" if key == "(empty)" else key for key in block.split()]
            for block in vector.get("extra_keys", "").split("|")
        ]
        blocks = len(tokens) // size
        found.append(
            {
                "title": title,
                **{name: vector[name] for name in ("fingerprint", "layout", "adapter", "namespace")},
                "block_size": size,
                "tokens": tokens,
                "extra_keys": (keys + [[]] * blocks)[:blocks],
                "root": vector["root"],
                "digests": [vector[f"digest_{block}"] for block in range(blocks)],
            }
        )
    return found


def write(folder: Path) -> None:
    """Writes all recorded files to a folder."""
    (folder / "sessions").mkdir(exist_ok=True)
    sessions = {kinds: session(kinds, seed) for seed, kinds in enumerate([*GROUPS, *APPEND_ONLY], SEED)}
    for name, recorded in {**sessions, "wishes and mistakes": scripted()}.items():
        lines = [json.dumps(line, separators=(",", ":")) + "\n" for line in recorded]
        (folder / "sessions" / f"{name.replace(' ', '-')}.jsonl").write_text("".join(lines))
    for name, vectors in (("hashes", hashes()), ("states", states())):
        rows = ",\n".join(json.dumps(vector, separators=(",", ":")) for vector in vectors)
        (folder / f"{name}.json").write_text(f"[\n{rows}\n]\n")


def stale(folder: Path) -> list[str]:
    """Returns the names of recorded files that differ between this folder and another one, or are only in one of
    them."""

    def files(root: Path) -> dict[str, str]:
        return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.json*")}

    here, there = files(HERE), files(folder)
    return sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))


def main() -> int:
    """Writes or compares the files; returns 1 if a compared file is outdated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is outdated")
    if not parser.parse_args().check:
        write(HERE)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        names = stale(Path(folder))
    if names:
        print(f"not fresh: {', '.join(names)}; run python conformance/record.py", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
