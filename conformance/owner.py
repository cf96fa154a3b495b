"""The Python owner for `run.py`: it reads lines of JSON and answers each. An example for other languages.

echo '{"hash": {"fingerprint": "ff", "layout": "x", "adapter": "", "namespace": "", "block_size": 1,
       "tokens": [7], "extra_keys": [[]]}}' | tr -d '\\n' | python conformance/owner.py
"""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from quire.hashing import block_digests, root_digest
from quire.protocol.outcomes import read_reply
from quire.protocol.state_digest import STATE_DIGEST_ENTRIES_MAX, in_turn, state_digest
from quire.session.block_report import report_chunks, report_end
from quire.session.ledger import Ledger
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

Line = dict[str, Any]


class Owner:
    """Answers as the owner of one pool after another.

    Attributes:
        ledger: the ledger of the last `spec`'s pool.
        last_step: number of the last applied step.
    """

    def __init__(self) -> None:
        self.ledger = Ledger(pb.PoolSpec(groups=[pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=1)]))
        self.last_step = 0

    def answer(self, asked: Line) -> Line:
        """Returns the answer to one line."""
        if "hash" in asked:
            return _hashed(asked["hash"])
        if "state" in asked:
            return {"digest": _state(asked["state"]).hex()}
        if "spec" in asked:
            self.ledger, self.last_step = Ledger(ParseDict(asked["spec"], pb.PoolSpec())), 0
        elif "step" in asked:
            step = packed.Step.FromString(ParseDict(asked["step"], pb.Step()).SerializeToString())
            reply = packed.StepReply.FromString(ParseDict(asked["reply"], pb.StepReply()).SerializeToString())
            self.ledger.apply(step, read_reply(step, reply, len(self.ledger.groups)))
            self.last_step = step.number
        elif "report" in asked:
            chunks = report_chunks(self.ledger)
            end = report_end(chunks, last_step=self.last_step, last_sequence_id=self.ledger.last_sequence_id)
            return {"chunks": [MessageToDict(chunk) for chunk in chunks], "end": MessageToDict(end)}
        else:
            return {"error": f"unknown: {', '.join(asked)}"}
        return {"digest": self.ledger.digest().hex()}


def _hashed(prompt: Line) -> Line:
    """Returns the root and the digests of a prompt."""
    fingerprint, adapter = bytes.fromhex(prompt["fingerprint"]), bytes.fromhex(prompt["adapter"])
    root = root_digest(fingerprint=fingerprint, layout=prompt["layout"], adapter=adapter, namespace=prompt["namespace"])
    keys = [[bytes.fromhex(key) for key in block] for block in prompt["extra_keys"]]
    digests = block_digests(root, prompt["tokens"], prompt["block_size"], extra_keys=keys)
    return {"root": root.hex(), "digests": [digest.hex() for digest in digests]}


def _state(state: Line) -> bytes:
    """Returns the digest of a whole state, or of the part that the answer to a step covers."""
    rows = [
        (
            *(int(row["id"]), row["token_count"], row["committed_token_count"], row["namespace"]),
            [array("I", table) for table in row["tables"]],
        )
        for row in state["sequences"]
    ]
    if not state["after_step"]:
        return state_digest(rows)
    turn = in_turn(range(len(rows)), state["after_step"])
    return state_digest([rows[at] for at in turn], STATE_DIGEST_ENTRIES_MAX)


def main() -> None:
    """Answers line by line until the input ends."""
    owner = Owner()
    for line in sys.stdin:
        try:
            answer = owner.answer(json.loads(line))
        except (LookupError, TypeError, ValueError, ParseError) as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
