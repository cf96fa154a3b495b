"""Models with recurrent states through the engine, compared token by token with transformers' own `generate`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from quire.cli import app
from quire.types import GroupKind
from quire.v1 import worker_pb2 as pb
from quire_worker.cache import NAN_BYTE, KVCache
from quire_worker.execution.sizing import PoolMemory
from quire_worker.model import loading
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.loading import load_model
from quire_worker.model.states import flat, mixers, state_pass
from quire_worker.model.states.state_pass import StateSegment
from quire_worker.model.states.view import SegmentView
from quire_worker.service import WorkerService
from transformers import AutoModelForCausalLM

from tests.worker.engine_harness import paged_model, prompt, reference_model, reference_text, running
from tests.worker.state_models import FURTHER, STATE_FAMILIES, write_with_states
from tests.worker.test_families import LENGTHS, pool_of

MAMBA2 = ["Bamba", "FalconH1", "NemotronH", "GraniteMoeHybrid"]  # The mixers of these families have CPU kernels.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = tmp_path_factory.mktemp("states")
    return {family: write_with_states(family, tiny / family) for family in STATE_FAMILIES}


@pytest.mark.parametrize("family", STATE_FAMILIES)
async def test_mixed_batches_prefix_hits_and_forks_give_the_text_of_transformers(
    folders: dict[str, Path], family: str
) -> None:
    folder = folders[family]
    blocks = pool_of(folder, 256)
    async with running(folder, blocks=blocks) as harness:
        played = await harness.play(LENGTHS)
        assert await harness.free_block_count() == blocks
    played.assert_text_of_transformers(folder)


def spare_pool_of(folder: Path, table_length: int) -> int:
    """Returns the size of a pool with states for two sequences and `table_length` blocks per attention group."""
    groups = paged_model(folder).cache_spec.groups
    states = sum(group.kind is GroupKind.STATE for group in groups)
    return 2 * states + table_length * (len(groups) - states)


@pytest.mark.parametrize("family", STATE_FAMILIES)
async def test_requests_that_outgrow_their_pool_are_preempted_and_finish_with_the_same_text(
    folders: dict[str, Path], family: str
) -> None:
    folder = folders[family]
    prompts = [prompt(18 + i, seed=i) for i in range(3)]
    # The pool admits two requests with two blocks each, and both requests grow to five blocks.
    blocks = spare_pool_of(folder, 7)
    async with running(folder, blocks=blocks) as harness:
        outputs = await asyncio.gather(
            *(harness.generate(tokens, max_tokens=56, ignore_eos=True) for tokens in prompts)
        )
        preemptions = harness.engine.scheduler.roster.preemption_count
        assert await harness.free_block_count() == blocks
    assert preemptions > 0
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = reference_text(folder, tuple(tokens), 56)
        assert output.tokens[0][: len(expected)] == expected
        assert len(output.tokens[0]) == 56


@pytest.mark.parametrize("family", ["Bamba", "Jamba", "MiniMax"])
async def test_the_text_goes_on_when_the_allocator_is_replaced_by_an_empty_one(
    folders: dict[str, Path], family: str
) -> None:
    tokens, blocks = prompt(50, seed=9), pool_of(folders[family], 64)
    async with running(folders[family], blocks=blocks) as harness:
        request = harness.submit(tokens, max_tokens=60, ignore_eos=True)
        task = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 10:
            await asyncio.sleep(0)
        await harness.replace_allocator()
        output = await task
        # This request hits the blocks that the engine reported to the new allocator.
        again = await harness.generate(tokens, max_tokens=60, ignore_eos=True)
        assert await harness.free_block_count() == blocks
    expected = reference_text(folders[family], tuple(tokens), 60)
    for each in (output, again):
        assert each.tokens[0][: len(expected)] == expected
        assert len(each.tokens[0]) == 60
    assert request.usage.preemption_count == 0
    assert again.request.usage.cached_token_count == 48


@pytest.mark.parametrize("family", STATE_FAMILIES)
async def test_a_workers_status_has_the_layout_of_states_that_its_plan_has(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders[family]
    blocks = pool_of(folder, 16)
    async with running(folder, blocks=blocks) as harness:
        service = WorkerService(harness.engine, pool="p", model_name="m", memory=PoolMemory(blocks, 1 << 20, None))
        status = service.GetStatus(pb.GetStatusRequest(), cast("Any", None))
    monkeypatch.setattr(sys, "argv", ["quire", "plan", str(folder), "--worker", "--dtype", "fp32", "--json"])
    with pytest.raises(SystemExit):
        app.run()
    layout, memory = json.loads(capsys.readouterr().out.splitlines()[-1])["layout"], status.memory
    assert status.block_bytes == layout["page_bytes"]
    assert memory.pool_bytes == blocks * layout["page_bytes"]
    assert (memory.group_count, memory.state_group_count) == (layout["group_count"], layout["checkpoint_block_count"])
    assert (memory.slot_bytes, memory.state_bytes) == (layout["slot_bytes"], layout["state_bytes"])
    assert memory.state_group_count > 0 < memory.state_bytes


async def test_prompts_with_a_shared_prefix_begin_from_a_checkpoint_in_it(folders: dict[str, Path]) -> None:
    folder, shared = folders["Bamba"], prompt(64, seed=1)
    prompts = [shared + prompt(30, seed=seed) for seed in (2, 3, 4)]
    async with running(folder, blocks=pool_of(folder, 64)) as harness:
        outputs = [await harness.generate(tokens, max_tokens=20) for tokens in prompts]
    # The first prompt has a checkpoint at its early end, token 64, so the other prompts hit 64 tokens.
    assert [output.request.usage.cached_token_count for output in outputs] == [0, 64, 64]
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens[0] == reference_text(folder, tuple(tokens), 20)


async def test_a_pass_that_fails_midway_leaves_states_as_they_were(folders: dict[str, Path]) -> None:
    folder, calls = folders["Bamba"], 0
    module: Any = paged_model(folder).module

    def fail_sometimes(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 7, 13):
            raise MemoryError

    prompts = [prompt(length, seed=length) for length in (5, 40, 70)]
    handle = module.model.layers[-1].register_forward_hook(fail_sometimes)
    try:
        async with running(folder, blocks=pool_of(folder, 64)) as harness:
            outputs = await asyncio.gather(*(harness.generate(tokens, max_tokens=20) for tokens in prompts))
            retries = harness.engine.telemetry.retry_count
    finally:
        handle.remove()
    assert retries >= 3
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens[0] == reference_text(folder, tuple(tokens), 20)


# -- logits, without an engine -----------------------------------------------------------------------------------------


def difference(folder: Path, dtype: str = "float32") -> float:
    """Returns the distance of logits from transformers' in float32.

    A prompt is computed in chunks, together with another sequence, in pages that contained NaN.
    """
    model, tokens = load_model(folder, dtype=dtype), prompt(70, seed=7)
    with torch.inference_mode():
        expected = reference_model(folder)(torch.tensor([tokens])).logits[0, -1]
    groups = model.cache_spec.groups
    cache = KVCache(model.cache_spec, 10 * len(groups))
    for buffer in cache.buffers:
        buffer.fill_(NAN_BYTE)
    tables = [[range(first + 10 * group, first + 10 * group + 5) for group in range(len(groups))] for first in (0, 5)]
    for start, stop in ((0, 41), (41, 69), (69, 70)):
        chunks = [  # Another sequence shares the passes.
            Chunk(tokens[start:stop][::-1], start, tables[1], needs_logits=False),
            Chunk(tokens[start:stop], start, tables[0], needs_logits=True, begun_with=len(tokens)),
        ]
        logits = model.forward(build_batch(chunks, groups=groups), cache)[0]
    return float((logits - expected).norm() / expected.norm())


def test_without_a_scan_of_its_own_jamba_is_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference(folders["Jamba"]) < 1e-4
    monkeypatch.setattr(mixers, "CONTINUATIONS", {})
    with pytest.raises(UnsupportedModelError, match="with paged attention its logits differ"):
        load_model(folders["Jamba"])


@pytest.mark.parametrize(
    ("family", "limits"), [("NemotronH", {"time_step_min": 0.5}), ("Bamba", {"time_step_limit": [0.8, 1.2]})]
)
def test_a_prompts_last_token_by_itself_has_its_time_step_within_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, limits: dict[str, Any]
) -> None:
    folder = write_with_states(family, tmp_path, **limits)
    assert difference(folder) < 1e-4
    told = flat.flat_of
    monkeypatch.setattr(state_pass, "flat_of", lambda batch: told(batch)._replace(has_limits=batch.input_ids[0] < 0))
    with pytest.raises(UnsupportedModelError, match="with paged attention its logits differ"):
        load_model(folder)
    monkeypatch.setattr(mixers, "flat_mixer", lambda *_: None)
    assert difference(folder) < 1e-4
    monkeypatch.setattr(mixers, "has_limits", lambda _: False)
    assert difference(folder) > 1e-2


@pytest.mark.parametrize("family", MAMBA2)
def test_without_kernels_mixers_of_mamba_2_take_segments_and_give_the_same(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    taken = flat.FlatMixer.__call__
    monkeypatch.setattr(flat.FlatMixer, "__call__", lambda self, *a, **k: calls.append(1) or taken(self, *a, **k))
    assert difference(folders[family]) < 1e-4
    assert calls
    calls.clear()
    monkeypatch.setattr(mixers, "flat_mixer", lambda *_: None)
    assert difference(folders[family]) < 1e-4
    assert not calls


async def test_decays_that_a_checkpoint_holds_rounded_are_computed_anew(tmp_path: Path) -> None:
    folder = write_with_states("MiniMax", tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    tokens = prompt(40, seed=40)
    async with running(folder, blocks=pool_of(folder, 16)) as harness:  # The model computes in float32.
        output = await harness.generate(tokens, max_tokens=20)
    assert output.tokens[0] == reference_text(folder, tuple(tokens), 20)


@pytest.mark.parametrize("family", ["Bamba", "Jamba", "FalconH1", "NemotronH", "Qwen3Next"])
def test_in_bfloat16_logits_are_about_as_near_as_those_of_transformers(folders: dict[str, Path], family: str) -> None:
    tokens = torch.tensor([prompt(70, seed=7)])
    with torch.inference_mode():
        expected = reference_model(folders[family])(tokens).logits[0, -1]
        half = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.bfloat16)(tokens).logits[0, -1]
    theirs = float((half.float() - expected).norm() / expected.norm())
    assert difference(folders[family], "bfloat16") < 1.5 * theirs + 0.01
    tensors = [t for _, kept in load_model(folders[family], dtype="bfloat16").cache_spec.states for t in kept]
    dtypes = {tensor.key.name: tensor.dtype for tensor in tensors}
    assert dtypes == {"conv": torch.bfloat16, "recurrent": torch.float32}, "each keeps the dtype of its layer"


def test_what_rounding_alone_does_to_a_model_in_bfloat16_is_no_reason_to_refuse_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference in the last bit can make MiniMax choose other experts."""
    assert load_model(folders["MiniMax"], dtype="bfloat16").cache_spec.dtype == torch.bfloat16
    monkeypatch.setattr(SegmentView, "get_linear_cache", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="with paged attention its logits differ"):
        load_model(folders["MiniMax"], dtype="bfloat16")  # A comparison in float32 finds the fault.
    monkeypatch.setattr(loading, "available_bytes", lambda: 1_000)
    with pytest.raises(
        UnsupportedModelError, match=r"changes .* by 0\.\d+ of .*; that needs 1\.6 MiB, but only 1,000 bytes"
    ):
        load_model(folders["MiniMax"], dtype="bfloat16")


def test_layers_of_minimax_that_attend_may_have_a_window(tmp_path: Path) -> None:
    assert difference(write_with_states("MiniMax", tmp_path, sliding_window=24)) < 1e-4


def test_a_layer_of_the_cache_gives_the_states_that_it_is_asked_for() -> None:
    """Transformers before 5.21 passes `state_idx`."""
    view = SegmentView(cast("Any", None), StateSegment(slice(0, 2), torch.tensor([0]), is_begun=False))
    inputs, state = torch.ones(1, 4, 2), torch.ones(1, 5)
    view.update_conv_state(inputs, 3, state_idx=1)
    view.update_recurrent_state(state, 3)
    layer = view.layers[3]
    assert torch.equal(cast(torch.Tensor, layer.conv_states[1]), inputs)
    assert layer.recurrent_states[0] is state
    assert layer.conv_states[0] is view.layers[2].recurrent_states[0] is None
    assert not layer.record_past


@pytest.mark.parametrize("name", FURTHER)
def test_logits_of_further_types_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert difference(write_with_states(name, tmp_path)) < 1e-4


def test_a_hybrid_all_of_whose_layers_attend_is_served(tmp_path: Path) -> None:
    folder = write_with_states("GraniteMoeHybrid", tmp_path, layer_types=["attention"] * 4, num_local_experts=0)
    assert difference(folder) < 1e-4
