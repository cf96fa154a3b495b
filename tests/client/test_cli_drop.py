"""`quire cache drop` on a real allocator."""

from __future__ import annotations

import json
from pathlib import Path

from quire import Allocator, PoolSpec
from quire.hashing import block_digests

from tests.allocator.service.one_by_one import calls
from tests.client.servers import allocator_process
from tests.client.test_cli import quire

DIGESTS = block_digests(bytes(32), list(range(12)), 4)


def test_the_cache_of_a_pool_or_of_a_namespace_is_forgotten(tmp_path: Path) -> None:
    with allocator_process(tmp_path) as allocator, Allocator(allocator.address) as client:
        with calls(client, "mine", PoolSpec.full_attention(block_count=8, block_size=4)) as session:
            for number, namespace in enumerate(("", "old tenant"), 1):
                session.allocate(number, 12, namespace=namespace)
                session.commit(number, 12, DIGESTS)
            session.free(1)
            session.free(2)
            session.allocate(3, 5, DIGESTS[:1])
            to = ("--dry-run", "--allocator", allocator.address)
            of_one = quire("cache", "drop", "mine", "--namespace", "old tenant", *to)
            assert of_one.stdout == "3 blocks would be dropped, 0 stay because sequences hold them\n"
            assert quire("cache", "drop", "mine", *to).stdout.startswith("5 blocks would be dropped, 2 stay")
            assert quire("cache", "drop", "mine", "--namespace", "?", *to).stdout.startswith("0 blocks would")
            of_one = quire("cache", "drop", "mine", "--namespace", "old tenant", "--allocator", allocator.address)
            assert of_one.stdout == "3 blocks dropped, 0 stay because sequences hold them\n"
            of_all = quire("cache", "drop", "mine", "--json", "--allocator", allocator.address)
            assert json.loads(of_all.stdout) == {"dropped_block_count": 2, "held_block_count": 2, "dry_run": False}
            assert client.match_prefix(DIGESTS)[0].matched_token_count == 4
        assert quire("cache", "drop", "mine", "--allocator", allocator.address).returncode == 6
