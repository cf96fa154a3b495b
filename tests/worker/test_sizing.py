"""The number of blocks of a pool, the refusal of pools that are too small, and how a pool is announced."""

from __future__ import annotations

import argparse
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from quire import Client, FinishReason
from quire.errors import InvalidArgumentError, Reason, UsageError
from quire.local import LocalStack
from quire_worker import host_memory
from quire_worker.cache import KVCache
from quire_worker.execution import sizing
from quire_worker.execution.sizing import (
    DeviceMemory,
    PoolMemory,
    check_room,
    profiled,
    profiled_sequences,
    size_pool,
    useful_blocks,
)
from quire_worker.model.paged_model import PagedModel
from quire_worker.process.options import memory_bytes, parse_arguments
from quire_worker.process.server import load
from structlog.testing import capture_logs

from tests.worker.engine_harness import paged_model
from tests.worker.state_models import write_with_states
from tests.worker.tiny_models import write_tiny, write_tiny_llama

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("sizing") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> PagedModel:
    return paged_model(folder)


def options_of(*arguments: str) -> argparse.Namespace:
    return parse_arguments(["--model", "model", *arguments])


def test_pages_get_what_the_formula_of_a_profiled_device_leaves() -> None:
    assert DeviceMemory(total=100, used=20, peak=35, current=15, utilization=0.9).free == 90 - 20 - 35 + 15
    # The worker may use 90 % of 80 GiB. Weights take 35 GiB, a pass takes 10 GiB more, and other processes take 1 GiB.
    found = DeviceMemory(80 * GIB, used=36 * GIB, peak=45 * GIB, current=35 * GIB, utilization=0.9)
    assert found.free == 80 * GIB * 9 // 10 - 36 * GIB - 10 * GIB
    assert DeviceMemory(10, 9, 1, 1, utilization=0.5).free == -4
    assert DeviceMemory(10**20 + 1, 0, 0, 0, utilization=1.0).free == 10**20 + 1, "no digit is lost"


class PretendedCuda:
    """Replaces the functions of `torch.cuda` that sizing calls, with a device of 1,000,000 bytes."""

    def __init__(self, page_bytes_of: Any) -> None:
        self.calls: list[str] = []
        self._page_bytes_of = page_bytes_of

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset")

    def memory_stats(self) -> dict[str, int]:
        self.calls.append("stats")
        return {"allocated_bytes.all.peak": 500_000 + self._page_bytes_of(), "allocated_bytes.all.current": 300_000}

    def empty_cache(self) -> None:
        self.calls.append("empty")

    def mem_get_info(self) -> tuple[int, int]:
        self.calls.append("info")
        return 650_000, 1_000_000


def test_the_profiling_pass_computes_the_largest_batch_and_leaves_its_own_pages_out(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[KVCache] = []

    class NotedCache(KVCache):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            caches.append(self)

    monkeypatch.setattr(sizing, "KVCache", NotedCache)
    batches = []
    build_batch = sizing.build_batch
    monkeypatch.setattr(sizing, "build_batch", lambda *a, **k: batches.append(build_batch(*a, **k)) or batches[-1])
    cuda = PretendedCuda(lambda: caches[0].pool_bytes)
    options = options_of("--max-batch-tokens", "100", "--max-running", "8", "--gpu-memory-utilization", "0.8")
    found = profiled(model, options, cuda)
    assert found == DeviceMemory(1_000_000, 350_000, 500_000, 300_000, 0.8)
    assert found.free == 800_000 - 350_000 - 500_000 + 300_000
    assert cuda.calls == ["reset", "stats", "empty", "info", "stats"]
    assert batches[0].input_ids.shape == (1, 100)
    assert batches[0].logits_index.shape == (8,)


@pytest.mark.parametrize(("room", "sequences"), [(0, 1), (25, 10), (1_000, 256)])
def test_a_profiling_pass_has_as_many_sequences_as_two_copies_of_their_states_leave_room_for(
    room: int, sequences: int, tmp_path: Path
) -> None:
    spec = paged_model(write_with_states("Bamba", tmp_path / "model")).cache_spec
    state_bytes = spec.plan.checkpoint_block_count * spec.bytes_per_block
    assert profiled_sequences(spec, 256, room * state_bytes) == sequences


def test_a_share_is_of_the_memory_that_there_is_and_nothing_said_is_half_of_what_is_left_or_all_that_is_of_use(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "memory_of", lambda _: GIB)
    block_bytes = model.cache_spec.bytes_per_block
    assert size_pool(model, options_of("--kv-memory", "80%")).block_count == GIB * 8 // 10 // block_bytes
    assert size_pool(model, options_of("--kv-memory", "3MiB")).block_count == 3 * 1024**2 // block_bytes
    assert size_pool(model, options_of("--blocks", "7")) == PoolMemory(7, 7 * block_bytes, None)
    monkeypatch.setattr(sizing, "available_bytes", lambda: 1 << 20)
    assert size_pool(model, options_of()).budget_bytes == 1 << 19
    assert size_pool(model, options_of(), rank_count=2).budget_bytes == 1 << 18, "each rank has a pool of its own"
    monkeypatch.setattr(sizing, "available_bytes", lambda: 64 * GIB)
    longest = model.cache_spec.plan.blocks_peak(model.max_position, model.max_position) * block_bytes
    assert size_pool(model, options_of("--max-running", "4096")).budget_bytes == 4096 * longest > 256 << 20
    assert size_pool(model, options_of()).budget_bytes == 256 << 20 > 64 * longest


def test_this_machine_s_memory_is_that_of_its_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    files = host_memory.ControlGroup((tmp_path / "max",), tmp_path / "current", tmp_path / "stat")
    none = host_memory.ControlGroup((tmp_path / "a",), tmp_path / "b", tmp_path / "c")
    monkeypatch.setattr(host_memory, "control_groups", lambda: [files, none])
    whole = sizing.memory_of(torch.device("cpu"))
    assert 0 < host_memory.available_bytes() < whole
    files.limits[0].write_text("max\n")
    assert sizing.memory_of(torch.device("cpu")) == whole > GIB
    files.limits[0].write_text("1000000\n")
    assert sizing.memory_of(torch.device("cpu")) == 1_000_000
    files.usage.write_text("700000\n")
    files.statistics.write_text("anon 5\ninactive_file 200000\n")
    assert host_memory.available_bytes() == 500_000, "what files take is given back"
    files.usage.write_text("2000000\n")
    assert host_memory.available_bytes() == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("256MiB", 256 << 20),
        ("1e9", 10**9),
        ("2GB", 2 * 10**9),
        ("80%", Fraction(4, 5)),
        ("12.5 %", Fraction(1, 8)),
        ("100TiB", 100 << 40),
    ],
)
def test_memory_is_a_size_or_a_share(text: str, expected: int | Fraction) -> None:
    assert memory_bytes(text) == expected


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "much", "0", "1e999", "5%%", ""])
def test_what_is_neither_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write"):
        memory_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kv-memory", "100TiB"], r"--kv-memory: 100\.0 TiB is more than the available \d+\.\d GiB"),
        (["--blocks", "2000000000"], r"--blocks: [\d.,]+ TiB is more than the available \d+\.\d GiB"),
        (
            ["--kv-memory", "1KiB"],
            r"0 blocks cannot hold any token; the pool needs at least 2 blocks of 4,096 .* 7\.0 KiB are missing: raise",
        ),
    ],
)
def test_a_pool_that_cannot_be_is_one_sentence_with_what_is_missing(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    folder = write_tiny(
        "gpt_oss", tmp_path / "model", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    with pytest.raises(UsageError, match=said) as raised:
        load(parse_arguments(["--model", str(folder), *arguments]))
    assert "\n" not in str(raised.value)


def test_a_device_without_room_says_how_it_was_computed_and_what_helps(model: PagedModel) -> None:
    found = DeviceMemory(10 * GIB, 9 * GIB, 9 * GIB, 8 * GIB, 0.9)
    spec = model.cache_spec
    with pytest.raises(UsageError) as raised:
        check_room(spec, PoolMemory(0, found.free, found), found.total, "--kv-memory")
    assert "10.0 GiB x 0.9 - 9.0 GiB used - 9.0 GiB at the peak + 8.0 GiB allocated leaves -1.0 GiB" in str(
        raised.value
    )
    assert "1.0 GiB are missing: raise --gpu-memory-utilization" in str(raised.value)


def test_figures_are_logged_and_a_pool_shorter_than_the_context_is_warned_of(folder: Path) -> None:
    with capture_logs() as lines:
        loaded = load(parse_arguments(["--model", str(folder), "--blocks", "9"]))
    (pool,) = (line for line in lines if line["event"] == "pool memory")
    assert {name: pool[name] for name in ("kv_heads", "head_dim", "block_bytes", "blocks", "slots")} == {
        "kv_heads": 2,
        "head_dim": 16,
        "block_bytes": loaded.cache.spec.bytes_per_block,
        "blocks": 9,
        "slots": 144,
    }
    (warning,) = (line for line in lines if line["log_level"] == "warning" and "context" in line["event"])
    assert (warning["sequence_tokens_max"], warning["context_tokens"]) == (144, 512)
    memory = warning["help"].split()[1]
    with capture_logs() as lines:
        load(parse_arguments(["--model", str(folder), "--kv-memory", memory]))
    assert not [line for line in lines if "context" in line["event"]], "what it advises is enough"


def test_a_limit_of_sequences_plans_the_pool_and_is_refused_where_the_pool_does_not_hold_one(folder: Path) -> None:
    with capture_logs() as lines:
        loaded = load(parse_arguments(["--model", str(folder), "--blocks", "9", "--max-model-len", "100"]))
    assert (loaded.model.max_position, loaded.model.cache_spec.token_count_max) == (100, 100)
    assert loaded.cache.sequence_tokens_max(512) == 112  # 100 tokens, rounded up to whole blocks
    assert [line["sequence_tokens_max"] for line in lines if line["event"] == "model loaded"] == [100]
    assert not [line for line in lines if line["log_level"] == "warning" and "context" in line["event"]]
    assert useful_blocks(loaded.model, 8) == 8 * 7
    with pytest.raises(UsageError, match=r"^--max-model-len 145: the pool of .* at most 144 tokens: use --kv-mem"):
        load(parse_arguments(["--model", str(folder), "--blocks", "9", "--max-model-len", "145"]))


def test_a_limit_of_sequences_beyond_the_model_s_context_ends_the_worker_at_its_start(folder: Path) -> None:
    command = [sys.executable, "-m", "quire_worker", "--model", str(folder), "--max-model-len", "513"]
    command += ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = f"quire-worker: --max-model-len must be at most 512, the context of {folder}, not 513"
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr


@pytest.mark.parametrize(
    ("asked", "said"), [("1", "must be at least 2, for a prompt and an answer"), ("8k", "invalid int")]
)
def test_a_limit_of_sequences_that_is_none_is_refused(
    asked: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options_of("--max-model-len", asked)
    told = capsys.readouterr().err
    assert "--max-model-len" in told
    assert said in told


def test_a_worker_tells_its_limit_and_keeps_it_to_the_token(folder: Path, tmp_path: Path) -> None:
    with (
        LocalStack(folder, worker_arguments=["--max-model-len", "40"], log_folder=tmp_path) as stack,
        Client(stack.worker_address) as client,
    ):
        assert client.status().sequence_tokens_max == 40
        (sample,) = client.generate([5] * 39, max_tokens=8, ignore_eos=True).samples
        assert (len(sample.token_ids), sample.finish_reason) == (1, FinishReason.LENGTH)
        with pytest.raises(InvalidArgumentError) as refused:
            client.generate([5] * 40, max_tokens=8)
    assert (refused.value.reason, refused.value.field) == (Reason.PROMPT_TOO_LONG, "prompt")


def test_the_status_of_a_worker_has_what_its_pool_was_sized_from(folder: Path, tmp_path: Path) -> None:
    arguments = ["--kv-memory", "1MiB", "--kv-cache-dtype", "fp8_e4m3"]
    with (
        LocalStack(folder, worker_arguments=arguments, log_folder=tmp_path) as stack,
        Client(stack.worker_address) as client,
    ):
        status = client.status()
    memory = status.memory
    assert status.block_bytes == 2 * 2 * 16 * 2 * 16  # 2 (keys and values) * layers * tokens * KV heads * dims
    assert (memory.budget_bytes, memory.pool_bytes) == (1 << 20, 1 << 20)
    assert (memory.kv_cache_dtype, memory.kv_head_count, memory.head_dim) == ("float8_e4m3fn", 2, 16)
    assert memory.device is None


def test_a_gpu_computes_more_at_a_time_unless_told_otherwise() -> None:
    on_cpu, on_gpu = (parse_arguments(["--model", "m", "--device", device]) for device in ("cpu", "cuda"))
    assert (on_cpu.max_batch_tokens, on_cpu.max_running) == (512, 64)
    assert (on_gpu.max_batch_tokens, on_gpu.max_running) == (4096, 256)
    told = parse_arguments(["--model", "m", "--device", "cuda", "--max-running", "7"])
    assert (told.max_batch_tokens, told.max_running) == (4096, 7)
