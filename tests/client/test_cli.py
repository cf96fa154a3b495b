"""The `quire` command as a process, against real servers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from quire import Allocator, GroupKind, GroupSpec, PoolSpec, Quota
from quire.cli import block_map, watch
from quire.cli.output import printable
from quire.events import BlocksRemoved
from quire.hashing import block_digests, root_digest
from quire.protocol.limits import PRIORITY_MAX
from quire.session import CallSession
from quire.v1 import worker_pb2 as worker_pb

from tests.allocator.service.one_by_one import calls
from tests.client.servers import (
    ScriptedServer,
    allocator_process,
    parsed,
    quire,
    scripted_server,
    secret_file,
    two_samples,
)

SPEC = PoolSpec.full_attention(block_count=64, block_size=4, cache_layout="test", model_fingerprint=b"\1m")
DIGESTS = block_digests(root_digest(fingerprint=b"\1m", layout="test"), list(range(8)), 4)
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CallSession]:
    """Opens a pool with a prompt of two blocks that two sequences share, a third block of each, and a cached block."""
    with (
        allocator_process(tmp_path_factory.mktemp("allocator"), "--lease", "600") as process,
        Allocator(process.address) as client,
        calls(client, "chat/demo", SPEC) as opened,
    ):
        opened.allocate(1, 9, DIGESTS, "tenant")
        opened.commit(1, 8, DIGESTS)
        opened.allocate(2, 9, DIGESTS, "tenant")
        opened.allocate(3, 5, block_digests(bytes(32), list(range(4)), 4), "tenant")
        opened.commit(3, 4, block_digests(bytes(32), list(range(4)), 4))
        opened.free(3)
        yield opened


@pytest.fixture(scope="module")
def allocator(session: CallSession) -> str:
    return session._link.address


@pytest.fixture
def worker() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.answers["Generate"] = two_samples
        yield running


# -- the allocator -----------------------------------------------------------------------------------------------------


def test_pools_is_a_table_or_json(allocator: str) -> None:
    table = quire("pool", "list", "--allocator", allocator).stdout
    assert "chat/demo" in table
    assert "unary" in table
    (pool,) = parsed(quire("pool", "list", "--json", QUIRE_ALLOCATOR=allocator))
    assert (pool["pool"], pool["held_block_count"], pool["cached_block_count"]) == ("chat/demo", 4, 1)
    assert (pool["spec"]["model_fingerprint"], pool["spec"]["groups"][0]["kind"]) == ("016d", "FULL_ATTENTION")
    assert pool["groups"] == [{"group": 0, "held_block_count": 4, "cached_block_count": 1}]


def test_pools_shows_the_groups_of_a_pool_that_has_several(allocator: str) -> None:
    sliding = GroupSpec(GroupKind.SLIDING_WINDOW, 4, 1_000)
    spec = PoolSpec(32, (GroupSpec(GroupKind.FULL_ATTENTION, 8), sliding, sliding), quotas=(Quota("*", 12),))
    with Allocator(allocator) as client, calls(client, "hybrid", spec) as hybrid:
        hybrid.allocate(1, 16)
        rows = [line.split() for line in quire("pool", "list", "--allocator", allocator).stdout.splitlines()]
        pools = parsed(quire("pool", "list", "--json", "--allocator", allocator))
    assert ["hybrid", "unary", "32", "4/8", "22", "0", "10", "1", "10", "16"] in rows
    assert [row for row in rows if row[1] in {"full", "sliding"}] == [
        ["0", "full", "8", "0", "2"],
        ["1,2", "sliding", "1,000", "4", "0", "4"],
    ]
    assert "quotas" not in pools[1]["spec"], "a list of pools leaves them out"


def test_blocks_draws_who_holds_what(allocator: str) -> None:
    result = quire("pool", "show", "chat/demo", "--allocator", allocator)
    assert result.returncode == 0, result.stderr
    head, first_row, *_ = result.stdout.splitlines()
    assert head == "chat/demo: 64 blocks, 4 held, 1 cached, 59 empty"
    assert first_row == " 0  ##ab_" + "." * 59
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["a", "1", "tenant", "8", "9", "3", "2"] in rows
    assert ["b", "2", "tenant", "8", "9", "3", "2"] in rows


def test_blocks_says_where_the_memory_goes(allocator: str) -> None:
    lines = quire("pool", "show", "chat/demo", "--allocator", allocator).stdout.splitlines()
    rows = [line.split() for line in lines]
    assert ["0", "full", "4", "4", "1"] in rows, "blocks by group"
    assert any(line.startswith("waste: 8 tokens of held blocks") and "0 evicted" in line for line in lines)
    assert any(line.startswith("fragmentation: stretches of free blocks 1 for 60 blocks") for line in lines)
    assert ["tenant", "4", "1", "2"] in rows, "its namespace"
    longest, shared = (index for index, line in enumerate(lines) if " prefixes " in line)
    prefix = [DIGESTS[1].hex()[:8], "8", "2", "2", "tenant"]
    assert (rows[longest + 1], rows[shared + 1]) == (prefix, prefix)


def test_the_map_keeps_to_the_width_and_to_the_rows_that_are_asked_for(allocator: str) -> None:
    result = quire("pool", "show", "chat/demo", "--allocator", allocator, "--rows", "2", COLUMNS="40")
    rows = result.stdout.splitlines()[2:]
    drawn = [line for line in result.stdout.splitlines() if re.fullmatch(r" *\d+  \S+", line)]
    assert drawn
    assert max(map(len, drawn)) <= 40
    assert any(row.startswith(" 0  ##ab_") and len(row) == 36 for row in result.stdout.splitlines())
    assert not any("more blocks" in row for row in rows)
    short = quire("pool", "show", "chat/demo", "--allocator", allocator, "--rows", "1", COLUMNS="40").stdout
    assert "... 32 more blocks" in short


def test_lines_without_anything_in_them_are_told_in_one(session: CallSession) -> None:
    with Allocator(session._link.address) as client:
        pool = client.get_pool_blocks("chat/demo")
    states = pool.block_states[:5] + bytes(1_000) + b"\1"
    picture = block_map.draw(replace(pool, block_states=states), width=22, rows_max=9).plain.splitlines()
    assert picture == ["   0  ##ab_" + "." * 11, "  16  ... 976 empty blocks", " 992  " + "." * 13 + "_"]
    assert (
        block_map.draw(replace(pool, block_states=bytes(32)), width=10, rows_max=1).plain == " 0  ... 32 empty blocks\n"
    )


def test_blocks_as_json_has_states_and_tables(allocator: str) -> None:
    found = parsed(quire("pool", "show", "chat/demo", "--json", "--allocator", allocator))
    assert found["block_states"][:5] == [3, 3, 2, 2, 1]
    assert [sequence["tables"] for sequence in found["sequences"]] == [[[0, 1, 2]], [[0, 1, 3]]]
    usage = found["usage"]
    assert usage["namespaces"] == [
        {"namespace": "tenant", "held_block_count": 4, "cached_block_count": 1, "sequence_count": 2}
    ]
    assert usage["most_shared_prefixes"][0]["digest_prefix"] == DIGESTS[1].hex()[:16]
    assert (usage["run_count"], usage["free_block_count"]) == (2, 60)


def test_more_sequences_than_letters_have_one_sign_in_common(session: CallSession) -> None:
    with Allocator(session._link.address) as client:
        pool = client.get_pool_blocks("chat/demo")
    crowd = tuple(replace(pool.sequences[0], sequence_id=i) for i in range(60))
    letters = [legend.letter for legend in block_map.legends(replace(pool, sequences=crowd)).values()]
    assert len(set(letters[:52])) == 52
    assert set(letters[52:]) == {block_map.OTHER}


# -- watching ----------------------------------------------------------------------------------------------------------


def test_watch_prints_a_line_for_each_event_with_short_digests(allocator: str) -> None:
    result = quire("pool", "watch", "chat/demo", "--snapshot", "--allocator", allocator)
    assert (result.returncode, result.stderr) == (0, "")
    first, *told, last = result.stdout.splitlines()
    assert first.split()[1:3] == ["cleared", "session"]
    assert last.split()[1:] == ["snapshot", "end"]
    shared = " ".join(digest.hex()[:8] for digest in DIGESTS)
    assert any(f"stored    {shared}, position 0, step 0, group 0, namespace tenant" in line for line in told)
    assert len(told) == 2


def test_watch_as_json_goes_on_where_an_earlier_one_ended(session: CallSession) -> None:
    address = session._link.address
    result = quire("pool", "watch", "chat/demo", "--snapshot", "--json", "--allocator", address)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == ["cleared", "stored", "stored", "snapshot_end"]
    assert sorted(len(event["digests"]) for event in events[1:3]) == [1, 2]
    assert (events[0]["session_id"], events[0]["pool"]) == (session.session_id.hex(), "chat/demo")
    # This test changes a pool of its own, because other tests read the other pools.
    with Allocator(address) as client, calls(client, "watched", SPEC) as watched:
        watched.allocate(1, 8)
        watched.commit(1, 4, DIGESTS[:1])
        watched.commit(1, 8, DIGESTS[1:])
        place = ("--session", watched.session_id.hex(), "--cursor", "1")
        command = [
            sys.executable,
            "-m",
            "quire.cli",
            "pool",
            "watch",
            "watched",
            "--json",
            "--allocator",
            address,
            *place,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            event = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
    assert (event["event"], event["cursor"], event["digests"]) == ("stored", 2, [DIGESTS[1].hex()])


def test_many_digests_are_cut_and_namespaces_cannot_steer_a_terminal() -> None:
    digests = tuple(bytes([number]) * 32 for number in range(7))
    told = BlocksRemoved("p", b"", 17, 3, (0, 2), "a\x1b[2J\nb", digests, 5)
    assert watch.line(told) == (
        "      17  removed   00000000 01010101 02020202 03030303 +3, position 5, step 3, group 0,2, "
        "namespace a\N{REPLACEMENT CHARACTER}[2J b, 7 blocks"
    )
    assert watch.line(replace(told, namespace="", digests=digests[:1])).endswith("namespace (none), 1 block")


# -- health ------------------------------------------------------------------------------------------------------------


def test_health_is_success_only_where_somebody_serves(allocator: str) -> None:
    healthy = quire("health", allocator)
    assert (healthy.returncode, healthy.stdout) == (0, "server=SERVING allocator=SERVING\n")
    assert quire("health", "127.0.0.1:1").returncode == 3


def test_health_keeps_to_its_timeout_where_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # The kernel accepts connections; no process reads them.
        start = time.monotonic()
        result = quire("health", f"127.0.0.1:{listening.getsockname()[1]}", "--timeout", "0.5")
    assert (result.returncode in (3, 4), result.stdout) == (True, "")
    assert result.stderr.startswith(("quire: DEADLINE_EXCEEDED", "quire: UNAVAILABLE"))
    assert time.monotonic() - start < 20


def test_the_timeout_of_health_is_for_all_its_questions_together(worker: ScriptedServer) -> None:
    remaining_s = []

    def check(_request: Any, context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:
        remaining_s.append(context.time_remaining())
        worker.released.wait(0.2)  # `released` is never set, so this delays the answer.
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    worker.answers["Check"] = check
    assert quire("health", worker.address, "--timeout", "5").returncode == 0
    assert len(remaining_s) == 3
    assert remaining_s[0] - remaining_s[2] > 0.3


# -- the worker --------------------------------------------------------------------------------------------------------


def test_generate_writes_exactly_the_text_to_standard_output(worker: ScriptedServer) -> None:
    def one(_request: Any, _context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        yield worker_pb.GenerateResponse(text="a\x1b", token_ids=[1])
        yield worker_pb.GenerateResponse(
            text="b", token_ids=[2], finish_reason=worker_pb.FINISH_REASON_LENGTH, usage=worker_pb.Usage()
        )

    worker.answers["Generate"] = one
    result = quire("generate", "-", "--worker", worker.address, "--seed", "0", stdin="from a pipe")
    assert (result.returncode, result.stdout) == (0, "a\x1bb\n")
    assert "0 prompt tokens (0 cached)" in result.stderr
    assert (worker.requests[0].text, worker.requests[0].sampling.max_tokens) == ("from a pipe", 64)


def test_generate_shows_samples_whole_where_it_is_no_terminal(worker: ScriptedServer) -> None:
    result = quire("generate", "p", "-n", "2", "--worker", worker.address)
    assert sorted(result.stdout.splitlines()) == ["0\tab", "1\txy"]
    assert "5 blocks taken, 4 saved by sharing, preempted 1 times" in result.stderr


def test_generate_shows_samples_side_by_side_on_a_terminal(worker: ScriptedServer) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "quire.cli", "generate", "p", "-n", "2", "--worker", worker.address]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "60", "LINES": "20", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=end, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(end)
        seen = b""
        with contextlib.suppress(OSError):  # Reading fails once the other side of the terminal has closed.
            while piece := os.read(terminal, 4096):
                seen += piece
    os.close(terminal)
    assert process.returncode == 0
    for words in (b"sample 0", b"sample 1", b"ab", b"xy"):
        assert words in seen


def test_generate_as_json_is_one_object(worker: ScriptedServer) -> None:
    found = parsed(quire("generate", "p", "-n", "2", "--json", "--worker", worker.address))
    assert [sample["text"] for sample in found["samples"]] == ["ab", "xy"]
    assert found["usage"]["cached_token_count"] == 2
    assert found["request_id"] == worker.requests[0].request_id


def test_a_priority_is_sent_as_it_is_and_none_beyond_the_scale(worker: ScriptedServer) -> None:
    for priority in (PRIORITY_MAX, -PRIORITY_MAX):
        parsed(quire("generate", "p", "--priority", str(priority), "--json", "--worker", worker.address))
        assert worker.requests[-1].priority == priority
    refused = quire("generate", "p", "--priority", str(PRIORITY_MAX + 1), "--worker", worker.address)
    assert refused.returncode == 2
    assert "--priority" in refused.stderr


def test_status_is_a_table_or_json(worker: ScriptedServer) -> None:
    worker.answers["GetStatus"] = lambda *_: worker_pb.GetStatusResponse(
        model="demo", model_aliases=["chat", "new"], pool="default", model_fingerprint=b"\1", prompt_token_count=10,
        cached_token_count=5,
    )  # fmt: skip
    table = quire("status", "--worker", worker.address).stdout
    assert "default, no session with the allocator" in table
    assert "10 of prompts (50% cached)" in table
    assert "demo, also chat, new (" in table
    assert parsed(quire("status", "--json", "--worker", worker.address))["model_fingerprint"] == "01"


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[2J\n\tb\x9b\r") == "a\N{REPLACEMENT CHARACTER}[2J\n\tb" + "\N{REPLACEMENT CHARACTER}" * 2


# -- usage of the command line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["pool", "list"],
        ["pool", "show", "p"],
        ["pool", "watch", "p"],
        ["status"],
        ["generate", "p"],
        ["health", "127.0.0.1:1"],
    ],
    ids=" ".join,
)
def test_nobody_listening_is_one_line_and_exit_code_3(command: list[str]) -> None:
    result = quire(*command, QUIRE_ALLOCATOR="127.0.0.1:1", QUIRE_WORKER="127.0.0.1:1")
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith("quire: UNAVAILABLE: no answer from 127.0.0.1:1: ")
    assert result.stderr.count("\n") == 1


def test_an_unknown_pool_is_one_line_and_exit_code_6(allocator: str) -> None:
    result = quire("pool", "show", "nowhere", "--allocator", allocator)
    assert result.returncode == 6
    assert result.stderr == "quire: NOT_FOUND / POOL_UNKNOWN: no pool named 'nowhere' is attached\n"


def test_a_token_is_taken_from_its_file_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    secret_file(tmp_path / "right", TOKEN)
    secret_file(tmp_path / "wrong", TOKEN[::-1])
    with allocator_process(tmp_path, "--token-file", str(tmp_path / "right")) as process:
        assert quire("health", process.address, QUIRE_TOKEN_FILE=str(tmp_path / "right")).returncode == 0
        pools = ["pool", "list", "--allocator", process.address]
        assert quire(*pools, "--token-file", str(tmp_path / "right")).returncode == 0
        for arguments in (["health", process.address], pools):
            result = quire(*arguments, "--token-file", str(tmp_path / "wrong"))
            assert result.returncode == 5
            assert result.stderr.startswith("quire: UNAUTHENTICATED / TOKEN: ")
