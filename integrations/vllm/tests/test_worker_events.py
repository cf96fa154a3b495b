"""The KV events of Quire's own worker, decoded by vLLM's classes.

Run by `make test-vllm`.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from peers import PYTHON, WHY_NOT, in_vllm
from quire.events import BlocksRemoved, BlocksStored, IndexCleared
from quire_worker.kv_events.published_index import Filled, Index
from quire_worker.kv_events.wire import EventBatch, block_hash

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

DIGESTS = (b"\xff" * 32, b"\x01" * 32)
DECODE = """
import sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.Decoder(KVEventBatch).decode(bytes.fromhex(sys.argv[1]))
told = [{"type": type(event).__name__, **msgspec.structs.asdict(event)} for event in batch.events]
print("\\n" + msgspec.json.encode([batch.ts, batch.data_parallel_rank, told]).decode())
"""


def test_vllms_own_classes_decode_every_kind_of_event() -> None:
    index = Index(0, 4, 100)
    index.note(Filled(b"", list(DIGESTS), array("I", [1, 2, 3, 4, 5, 6, 7, 8]), "poet", ("salt",)))
    events = [
        *index.apply(IndexCleared("pool", b"s", 0, 0)),
        *index.apply(BlocksStored("pool", b"s", 1, 1, (0,), "", b"", DIGESTS, 4, 0)),
        *index.apply(BlocksRemoved("pool", b"s", 2, 2, (0,), "", DIGESTS[1:], 1)),
    ]
    payload = msgspec.msgpack.encode(EventBatch(1.5, events))
    ts, rank, told = msgspec.json.decode(in_vllm("-c", DECODE, payload.hex()).splitlines()[-1])
    assert (ts, rank) == (1.5, 0)
    cleared, stored, removed = ({name: each for name, each in event.items() if each is not None} for event in told)
    expected: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, block_hash(DIGESTS[1])],
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "block_size": 4,
        "medium": "GPU",
        "lora_name": "poet",
        "extra_keys": [["poet", "salt"], ["poet"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert cleared == {"type": "AllBlocksCleared"}
    assert stored == expected
    assert removed == {
        "type": "BlockRemoved",
        "block_hashes": [block_hash(DIGESTS[1])],
        "medium": "GPU",
        "group_idx": 0,
    }
