"""The GPU part of `benchmarks/kernels.py`, tested without a GPU: its sides in the interpreter, rules and arithmetic."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import kernels
from kernel_sides import gpu, gpu_cases, gpu_goals, vllm_peers
from kernel_sides.flex import page_mask
from kernel_sides.gpu_cases import Case, Grouped, Latent
from kernel_sides.gpu_scenes import GroupedScene, scene_of
from report import Goal, Part, publish_parts

GROUPED = Grouped("heads", 10, 2, 32)
LATENT = Latent("latent", 16, 32, 16)
DECODE = Case("decode", GROUPED, 2, 70, 64)
DEFAULTS = (
    gpu_cases.WORKS, gpu_cases.SHAPES, gpu_cases.BATCHES, gpu_cases.CONTEXTS, gpu_cases.PAGE_SIZES,
)  # fmt: skip
ROW = {"work": "decode", "batch": 32, "context": 8192, "status": "measured", "note": "", "vllm_ratio": ""}


def bench(device: torch.device | None = None, **changed: Any) -> gpu.Bench:
    """Makes a bench with a timer that calls the timed function, and always reports one millisecond."""

    def timer(side: Callable[[], torch.Tensor]) -> float:
        side()
        return 1.0

    given: dict[str, Any] = {
        "device": device or torch.device("cpu"), "dtype": torch.float32, "timer": timer, "synchronize": lambda: None,
        "memory_bytes": 1e12, "copy_bytes_per_s": 1e9, "matmul_operations_per_s": 1e12, "rounds": 2,
    }  # fmt: skip
    return gpu.Bench(**(given | changed))


class FakeScene:
    """A scene with sides that return constants."""

    def __init__(self, **peers: float) -> None:
        self.result = torch.ones(2, 10, 32)
        self.peers = {name: self.side_of(value) for name, value in peers.items()}

    def side_of(self, value: float) -> Callable[[], Callable[[], torch.Tensor]]:
        return lambda: lambda: torch.full((2, 10, 32), value)

    def quire(self) -> Callable[[], torch.Tensor]:
        return lambda: self.result

    def reference(self) -> tuple[list[int], torch.Tensor]:
        return [1], torch.ones(1, 10, 32)


@pytest.mark.parametrize(
    "case",
    [DECODE, Case("prefill", GROUPED, 2, 21, 16), Case("decode", LATENT, 2, 40, 16)],
    ids=lambda case: case.title,
)
def test_all_sides_of_a_batch_give_the_same(case: Case, device: torch.device) -> None:
    # On a GPU, SDPA's float32 kernels do not support KV heads that several query heads share.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    row = gpu.measure_case(case, bench(device, dtype=dtype), without=["flex", "vllm"])
    assert row["status"] == "measured"
    assert row["note"] == ""
    peer = "torch" if isinstance(case.shape, Latent) else "sdpa"
    assert (row["quire_ms"], row[f"{peer}_ms"], row[f"{peer}_ratio"]) == (1.0, 1.0, 1.0)
    assert row["vllm_ms"] == row["flex_ms"] == ""


def test_the_wrong_keys_would_be_noticed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of(DECODE, device, torch.float32)
    assert isinstance(scene, GroupedScene)
    monkeypatch.setattr(scene.pool, "table", scene.pool.table.roll(1, 0))  # The two sequences swap their tables.
    with pytest.raises(ValueError, match="Quire differs from the reference"):
        gpu.measure_case(DECODE, bench(device), scene=scene)


@pytest.mark.parametrize(
    ("rows", "queries", "context"), [(1, 1, 128), (1, 1, 70), (4, 1, 70), (70, 70, 70), (40, 40, 70)]
)
def test_flex_attention_sees_what_it_should(rows: int, queries: int, context: int) -> None:
    block, batch = 16, 2
    count = -(-context // block)
    table = torch.randperm(batch * count).view(batch, count)
    mask = page_mask(
        table, key_length=(2 * batch * count - 1) * block, block=block, query_length=rows, queries=queries,
        context=context, query_block=32,
    )  # fmt: skip
    key_count = mask.seq_lengths[1]
    query, key = torch.arange(rows)[:, None], torch.arange(key_count)[None]
    # If there are more rows than queries, the rows are packed: all rows are heads of the same query.
    last = query[:, 0] + context - queries if rows == queries else torch.tensor(context - 1)
    for b in range(batch):
        sees = mask.mask_mod(torch.tensor(b), torch.tensor(0), query, key).expand(rows, -1)
        expected = torch.zeros(rows, key_count, dtype=torch.bool)
        for position in range(context):
            row = int(table[b, position // block]) * 2 * block + position % block
            expected[:, row] = position <= last
        assert torch.equal(sees, expected)
        for number, some in enumerate(sees.split(32)):
            listed: dict[int, bool] = {}
            for counts, indices, whole in (
                (mask.kv_num_blocks, mask.kv_indices, False),
                (mask.full_kv_num_blocks, mask.full_kv_indices, True),
            ):
                listed |= dict.fromkeys(indices[b, 0, number, : counts[b, 0, number]].tolist(), whole)
            for page, part in enumerate(some.split(block, dim=1)):
                assert page in listed or not part.any()
                assert not listed.get(page) or part.all()


def test_who_differs_or_fails_is_not_timed_and_the_row_says_so() -> None:
    scene = FakeScene(sdpa=1.0, torch=1.01, vllm=float("nan"))
    scene.peers["flex"] = lambda: 1 / 0  # type: ignore[assignment,return-value]
    row = gpu.measure_case(Case("decode", GROUPED, 2, 70, 64), bench(), scene=scene)  # type: ignore[arg-type]
    assert row["sdpa_ms"] == 1.0
    assert row["torch_ms"] == row["vllm_ms"] == row["flex_ms"] == ""
    assert row["note"] == (
        "torch: differs by 0.01 of a row; vllm: differs by nan of a row; flex: ZeroDivisionError: division by zero"
    )


def test_shares_are_of_the_median_and_ratios_the_median_of_the_rounds() -> None:
    times = {1.0: iter([9.0, 2.0, 4.0]), 1.0005: iter([9.0, 6.0, 8.0])}  # the first round (9 ms) does not count

    def timer(side: Callable[[], torch.Tensor]) -> float:
        return next(times[round(side()[0, 0, 0].item(), 4)])

    row = gpu.measure_case(DECODE, bench(timer=timer), scene=FakeScene(sdpa=1.0005))  # type: ignore[arg-type]
    assert (row["quire_ms"], row["sdpa_ms"], row["sdpa_ratio"], row["rounds"]) == (3.0, 7.0, 2.5, 2)
    # The bytes of two sequences: keys and values of 70 tokens, and queries and results of one token.
    moved = 2 * (70 * 2 * 2 * 32 * 2 + 2 * 10 * 32 * 2)
    assert row["share_copy"] == round(moved / 3e-3 / 1e9, 3) == 0.013
    assert row["tflop_per_s"] == round(DECODE.operations / 3e-3 / 1e12, 2)


def test_a_prompts_operations_are_those_under_the_causal_mask() -> None:
    pairs = sum(range(1, 22))
    assert Case("prefill", GROUPED, 3, 21, 16).operations == 3 * pairs * 4 * 10 * 32
    assert DECODE.operations == 2 * 70 * 4 * 10 * 32
    assert Case("decode", LATENT, 2, 40, 16).operations == 2 * 40 * 16 * 2 * (48 + 32)


def test_what_does_not_fit_takes_too_long_or_fails_is_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, big = Case("decode", GROUPED, 2, 71, 16), Case("prefill", GROUPED, 2, 1024, 16)
    huge, last = Case("decode", GROUPED, 256, 1 << 24, 16), Case("decode", GROUPED, 2, 72, 16)
    scene = FakeScene()

    def scene_of(case: Case, *_: Any) -> FakeScene:
        scene.result = torch.zeros(2, 10, 32) if case is broken else torch.ones(2, 10, 32)
        return scene

    monkeypatch.setattr(gpu, "scene_of", scene_of)
    # The clock is read at the start, before each case that may be measured, and after every case.
    clock = iter([0.0, *[1.0] * 6, 11.0, 11.0])
    lines: list[str] = []
    rows = gpu.measure_all(
        [broken, DECODE, big, huge, last], bench(), operations_max=1e8, budget_s=10, progress=lines.append,
        clock=lambda: next(clock),
    )  # fmt: skip
    assert [row["status"] for row in rows] == ["failed", "measured", "left out", "left out", "left out"]
    assert rows[0]["note"] == "ValueError: Quire differs from the reference by 1 of a row"
    assert rows[2]["note"] == "1.3e+09 operations a launch, measured up to 1.0e+08"
    assert rows[3]["note"] == "needs 1106.0 GB, has 1000.0 GB"
    assert rows[4]["note"] == "no time: 10 s are over"
    assert len(lines) == 5
    assert len({tuple(row) for row in rows}) == 1  # all rows have the same columns


def test_a_device_that_was_lost_ends_the_measuring_and_keeps_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose() -> None:
        raise RuntimeError("an illegal memory access")

    scene = FakeScene()
    scene.peers["vllm"] = lambda: 1 / 0  # type: ignore[assignment,return-value]
    monkeypatch.setattr(gpu, "scene_of", lambda *_: scene)
    rows = gpu.measure_all(
        [DECODE, DECODE], bench(synchronize=lose), operations_max=1e14, budget_s=10, progress=lambda _: None
    )
    assert [row["status"] for row in rows] == ["failed", "left out"]
    assert rows[0]["note"] == "RuntimeError: vllm: the device was lost: RuntimeError: an illegal memory access"
    assert rows[1]["note"] == "the device was lost: RuntimeError: an illegal memory access"


def test_every_case_of_the_issue_is_there_and_a_large_gpu_leaves_out_few() -> None:
    found = list(gpu_cases.cases(*DEFAULTS))
    assert len(found) == len(set(found)) == 2 * 9 * 3 + 2 * 9 * 2
    left = [case for case in found if gpu_cases.left_out(case, memory_bytes=1.4e11, operations_max=3e14)]
    assert {(case.work, case.batch, case.context) for case in left} == {("prefill", 32, 65536), ("prefill", 256, 65536)}


def test_dense_keys_and_flex_attention_are_left_out_by_rule() -> None:
    llama = gpu_cases.SHAPES["llama"]
    full = Case("decode", llama, 256, 65536, 64)
    assert gpu_cases.side_left_out(full, "sdpa", memory_bytes=1.4e11) == "dense keys need 143.9 GB, has 140.0 GB"
    assert gpu_cases.side_left_out(full, "vllm", memory_bytes=1.4e11) == ""
    assert gpu_cases.side_left_out(full, "flex", memory_bytes=1e12) == "pool of 2^35.0 elements"
    small = Case("decode", llama, 1, 1024, 16)
    assert gpu_cases.side_left_out(small, "flex", memory_bytes=1e12) == "blocks of 16 keys"
    assert gpu_cases.side_left_out(Case("decode", llama, 1, 1024, 64), "flex", memory_bytes=1e12) == ""


def test_goals_are_the_least_values_of_the_rows_they_are_about() -> None:
    rows: list[gpu_goals.Row] = [
        ROW | {"share_copy": 0.93, "vllm_ratio": 1.4},
        ROW | {"share_copy": 0.91, "context": 65536, "vllm_ratio": 0.97},
        ROW | {"share_copy": 0.2, "batch": 1},
        ROW | {"share_copy": 0.3, "context": 1024},
        ROW | {"share_copy": "", "status": "left out", "note": "needs more"},
        ROW | {"work": "MLA decode", "share_copy": 0.7, "note": "vllm: No module named 'vllm'"},
        ROW | {"work": "prefill", "batch": 1, "share_matmul": 0.65, "vllm_ratio": 2.0},
        ROW | {"work": "prefill", "batch": 1, "context": 1024, "share_matmul": 0.1},
    ]
    goals = gpu_goals.goals(rows)
    assert [(goal.value, goal.goal, goal.better) for goal in goals] == [
        (0.91, 0.9, "higher"), (0.7, 0.9, "higher"), (0.65, 0.6, "higher"), (0.1, 0.6, "higher"),
        (0.97, 1.0, "higher"), (None, 1.0, "higher"),
    ]  # fmt: skip
    assert goals[5].name.endswith("(not measured: vllm: No module named 'vllm')")
    assert [goal.is_met for goal in goals] == [True, False, True, False, False, False]


def test_a_case_that_failed_is_no_goal_met() -> None:
    rows = [ROW | {"share_copy": 0.93}, ROW | {"share_copy": "", "status": "failed", "note": "wrong"}]
    goal = gpu_goals.goals(rows)[0]
    assert (goal.value, goal.is_met) == (None, False)
    assert goal.name.endswith("(1 failed: wrong)")


def test_all_parts_are_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [Part("a", [{"x": 1}], [Goal("g", None, 1.0, "higher")], None), Part("b", [{"y": 2}], [], None)]
    publish_parts(parts, as_json=True, accelerator="a GPU")
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["commit", "machine", "rows", "goals"]
    assert printed["machine"].endswith(", a GPU")
    assert printed["rows"] == [{"x": 1}, {"y": 2}]
    assert printed["goals"] == [{"name": "g", "value": None, "goal": 1.0, "better": "higher"}]


@pytest.mark.parametrize(
    ("options", "has_gpu", "rows"),
    [([], False, ["cpu"]), (["--parts", "gpu"], False, ["cpu"]), ([], True, ["gpu"]),
     (["--parts", "cpu", "gpu"], True, ["gpu", "cpu"])],
)  # fmt: skip
def test_what_is_measured_where(
    options: list[str], has_gpu: bool, rows: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--json", *options])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(kernels, "accelerator", lambda: "a GPU")
    for part in ("cpu", "gpu"):
        monkeypatch.setattr(kernels, f"measure_{part}", lambda _, part=part: Part(part, [{"part": part}], [], None))
    kernels.main()
    printed = capsys.readouterr()
    assert [row["part"] for row in json.loads(printed.out)["rows"]] == rows
    assert ("no CUDA GPU" in printed.err) == (not has_gpu)


def test_the_whole_command_on_tiny_shapes(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.csv"
    options = (
        "--json --works decode --batches 1 --contexts 40 --page-sizes 16 --shapes llama mla --repeat 2 --without flex"
    )
    monkeypatch.setattr(sys, "argv", ["kernels.py", *options.split(), "vllm", "--csv-gpu", str(file)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu, "cuda_bench", lambda rounds: bench(device, rounds=rounds))
    monkeypatch.setattr(gpu_cases, "SHAPES", {"llama": GROUPED, "mla": LATENT})
    kernels.main()
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert [(row["work"], row["status"], row["rounds"]) for row in report["rows"]] == [
        ("MLA decode", "measured", 2), ("decode", "measured", 2),
    ]  # fmt: skip
    assert len(report["goals"]) == 6
    assert f"a GPU, torch {torch.__version__}" in report["machine"]
    assert printed.err.count("MLA decode, latent, batch 1, context 40, page 16: 1.0 ms") == 1
    assert len(file.read_text(encoding="utf-8").splitlines()) == 3


@pytest.mark.parametrize("folder", vllm_peers.FOLDERS)
def test_vllm_is_found_where_it_was_and_given_what_it_takes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unified_attention(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, block_table: torch.Tensor) -> None:
        out.copy_(q + k[block_table[:, 0].long(), 0].repeat_interleave(5, 1))

    for depth in range(1, folder.count(".") + 2):
        name = ".".join(folder.split(".")[:depth])
        package = ModuleType(name)
        package.__path__ = []  # makes the module a package without files
        monkeypatch.setitem(sys.modules, name, package)
    module = ModuleType(f"{folder}.triton_unified_attention")
    module.unified_attention = unified_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scene = scene_of(DECODE, torch.device("cpu"), torch.float32)
    assert isinstance(scene, GroupedScene)
    first = scene.pool.pages[scene.pool.table[:, 0], 0, 0]  # [batch, kv_heads, head_dim]
    assert torch.equal(scene.vllm()(), scene.query + first.repeat_interleave(5, 1))


def test_without_vllm_the_reason_is_its_absence() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(ImportError, match="No module named 'vllm'"):
        vllm_peers.unified_side(torch.ones(2, 2, 8), torch.ones(2, 2, 4, 1, 8), torch.zeros(2, 1), 4)
