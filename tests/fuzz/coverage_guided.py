"""`python -m tests.fuzz.coverage_guided CORPUS`: reads bytes as requests, guided by coverage of the allocator's code.

Needs atheris, which is not among the dependencies (`pip install atheris`). Options of atheris follow, such as
-runs=1000000. The first byte selects the kind of request, and the rest is its bytes. The corpus starts with valid
requests.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris
from google.protobuf.message import DecodeError, Message

with atheris.instrument_imports(include=["quire_allocator", "quire.protocol.steps", "quire.protocol.state_digest"]):
    from quire.v1 import _packed_pb2 as packed
    from quire.v1 import allocator_pb2 as pb

    from tests.fuzz.allocator import UNARY, Episode, Seen
    from tests.fuzz.requests import READING

METHODS = ("Session", *UNARY, *READING)
SEED = 11


class Target:
    """Holds one episode, and replaces it after every accepted request."""

    def __init__(self) -> None:
        self.episode = self._new()

    def _new(self) -> Episode:
        return Episode(random.Random(SEED), Seen())

    def right(self) -> list[bytes]:
        """Returns requests that are accepted, as the initial corpus."""
        episode = self.episode
        plausible, ledger, pool = episode.plausible, episode.owner.ledger, episode.directory.pool("pool").pool
        step = plausible.step(ledger, pool).message
        step.session_id, step.number = episode.owner.session_id, episode.owner.last_step + 1
        found = [b"\0" + packed.SessionRequest(step=step).SerializeToString()]
        found.append(b"\0" + packed.SessionRequest(attach=episode._attach_message("pool")).SerializeToString())
        for number, method in enumerate(METHODS[1:], 1):
            request: Message = (
                plausible.reading(method)
                if method in READING
                else plausible.unary(method, episode.directory.session(episode.unary_id), episode.spec)
            )
            found.append(bytes([number]) + request.SerializeToString())
        return found

    def __call__(self, data: bytes) -> None:
        method = METHODS[data[0] % len(METHODS)] if data else "ListPools"
        try:
            if method == "Session":
                self._send(packed.SessionRequest.FromString(data[1:]))
            else:
                kind = pb.Step if method == "Apply" else getattr(pb, f"{method}Request")
                request: Message = kind.FromString(data[1:])
                if self.episode._call(method, request) is not None and method not in READING:
                    self.episode = self._new()
        except DecodeError:
            return

    def _send(self, request: packed.SessionRequest) -> None:
        episode = self.episode
        if request.WhichOneof("message") == "detach":
            return
        if episode._receive(episode.machine, request, "Session: any", "pool") is None:
            episode._resume()
        else:
            episode.directory.check_invariants()
            self.episode = self._new()


def main() -> None:
    """Runs until atheris ends the process, and does not return."""
    target = Target()
    corpus = Path(next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "corpus"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.right()):
        (corpus / f"right-{number}").write_bytes(data)
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
