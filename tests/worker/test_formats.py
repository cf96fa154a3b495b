"""Page formats (fp8 with scales, and HND) on every path, compared with plain pages that hold the same numbers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quire.hashing import root_digest
from quire_worker.attention import PagedAttention
from quire_worker.cache import NAN_BYTE, CacheSpec, KVCache
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.checkpoint import CheckpointError
from quire_worker.model.kv_scales import read_scales
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.page_format import Scales, quantised, restored
from safetensors.torch import load_file, save_file

from tests.worker import engine_harness
from tests.worker.attention_batches import Scene, device_of, implementation, tolerance_of
from tests.worker.engine_harness import prompt, reference_model, reference_text, running
from tests.worker.tiny_models import write_tiny, write_tiny_llama

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Page format -> allowed difference of logits from logits with plain pages, as a share of the logits' norm. The model's
# random weights are ten times larger than usual. The measured difference is half of this limit.
LOGITS_DIFFER_MAX = {"fp8_e4m3": 0.2, "fp8_e5m2": 0.4}
SCALES = Scales(0.5, 0.25)


@pytest.fixture(params=["torch", "cpu", "triton"])
def attention(request: pytest.FixtureRequest, device: torch.device) -> PagedAttention:
    return implementation(request.param, device)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_stored(
    scene: Scene, attention: PagedAttention, stored: torch.dtype, *, is_hnd: bool, window: int
) -> torch.Tensor:
    """Runs a scene on pages of another format; the scene's earlier keys are appended too."""
    device, spec = device_of(attention), scene.spec
    pages_shape = (scene.pages.shape[0], *spec.page_shape)
    own = replace(spec, dtype=stored, computed_in=spec.dtype, is_hnd=is_hnd, stride=None)
    elements = torch.full((pages_shape[0] * own.page_stride * stored.itemsize,), NAN_BYTE, dtype=torch.uint8)
    pages = elements.view(stored).as_strided(pages_shape, (own.page_stride, *own.page_strides)).to(device)
    for index, (before, _) in enumerate(scene.lengths):
        for position in range(before):
            page = scene.batch.block_tables[index, position // spec.block_size]
            for half, (numbers, scale) in enumerate(zip((scene.keys, scene.values), SCALES, strict=True)):
                new = numbers[index][position].to(device)
                kept = new if stored == spec.dtype else quantised(new, scale, stored)
                place = pages[page, half, position % spec.block_size]
                place.view(torch.uint8).copy_(kept.view(torch.uint8))
    plan = attention.plan(scene.batch, own)
    key, value = (scene.new_tokens_of(tensors).to(device) for tensors in (scene.keys, scene.values))
    plan.append(key, value, pages, scales=SCALES)
    return plan.attend(scene.query.to(device), pages, scale=0.2, window_left=window, scales=SCALES).cpu()


@pytest.mark.parametrize("is_hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("stored", [E4M3, E5M2, None], ids=["e4m3", "e5m2", "plain"])
@pytest.mark.parametrize("lengths", [[(5, 1), (40, 1)], [(0, 30), (17, 5), (33, 1)]], ids=["decode", "mixed"])
def test_pages_of_any_format_are_attended_to_as_what_they_hold(
    attention: PagedAttention, lengths: list[tuple[int, int]], stored: torch.dtype | None, *, is_hnd: bool
) -> None:
    scene = Scene(lengths)
    got = run_stored(scene, attention, stored or torch.float32, is_hnd=is_hnd, window=20)
    if stored is not None:  # The reference uses rounded keys and values, like the pages.
        for numbers, scale in zip((scene.keys, scene.values), SCALES, strict=True):
            numbers[:] = [restored(quantised(own, scale, stored), scale, torch.float32) for own in numbers]
    tolerance = tolerance_of(attention, torch.float32)
    torch.testing.assert_close(got.double(), scene.reference(window_left=20), rtol=tolerance, atol=tolerance)


def test_numbers_beyond_the_largest_saturate_and_nan_stays_nan() -> None:
    x = torch.tensor([1e6, -1e6, float("nan"), 3.0])
    assert quantised(x, 2.0, E4M3).float().nan_to_num(7.0).tolist() == [448.0, -448.0, 7.0, 1.5]
    assert quantised(x, 2.0, E5M2).float().nan_to_num(7.0).tolist() == [57344.0, -57344.0, 7.0, 1.5]


def test_pages_of_either_order_and_the_tuple_are_views_of_the_same_bytes() -> None:
    plain = CacheSpec.full_attention(2, 2, 4, 8, torch.float32)
    for spec in (plain, replace(plain, is_hnd=True)):
        cache = KVCache(spec, 3)
        cache.buffers[0].view(torch.float32).copy_(torch.arange(3 * 2 * 8 * 2 * 4).view(3, -1))
        pages, (keys, values) = cache.layers[0].pages, cache.layers[0].key_and_value
        assert pages.shape == (3, 2, 8, 2, 4)
        assert keys.shape == values.shape == (3, 8, 2, 4)
        assert keys.data_ptr() == pages[:, 0].data_ptr()
        assert values.data_ptr() == pages[:, 1].data_ptr()
        token, head = (4, 32) if spec.is_hnd else (8, 4)
        assert pages[0, 0, 1, 0, 0] == token
        assert pages[0, 0, 0, 1, 0] == head


def test_fp8_takes_a_quarter_of_the_bytes_and_no_format_hits_another() -> None:
    plain = CacheSpec.full_attention(2, 2, 4, 8, torch.float32)
    layers = tuple(replace(layer, element_bytes=1) for layer in plain.layers)
    eights = [replace(plain, layers=layers, stored_as=dtype) for dtype in (E4M3, E5M2)]
    specs = [
        plain,
        replace(plain, is_hnd=True),
        *eights,
        replace(eights[0], dtype=torch.bfloat16),
        replace(eights[0], is_hnd=True),
        replace(eights[0], scales=((0, SCALES),)),
        replace(eights[0], scales=((1, SCALES),)),
    ]
    assert eights[0].bytes_per_block * 4 == plain.bytes_per_block == 2 * 8 * 2 * 2 * 4 * 4
    assert KVCache(eights[0], 5).pool_bytes == 5 * eights[0].bytes_per_block
    assert len({root_digest(fingerprint=b"", layout=spec.layout) for spec in specs}) == len(specs)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("formats") / "model")


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("gpt_oss", tmp_path_factory.mktemp("formats") / "windows")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[Path, PagedModel]:
    """Returns a dictionary of models that the harness runs in place of a folder's model."""
    models = dict[Path, PagedModel]()
    monkeypatch.setattr(engine_harness, "paged_model", lambda folder: models[folder])
    return models


def logits_of(model: PagedModel, tokens: list[int]) -> torch.Tensor:
    """Returns the logits after the last token, computed in two chunks through new pages."""
    groups, length = model.cache_spec.groups, -(-len(tokens) // 16)
    cache = KVCache(model.cache_spec, length * len(groups))
    for buffer in cache.buffers:
        buffer.fill_(NAN_BYTE)
    tables = [range(length * group, length * (group + 1)) for group in range(len(groups))]
    for start, stop in ((0, 41), (41, len(tokens))):
        chunk = Chunk(tokens[start:stop], start, tables, needs_logits=True)
        logits = model.forward(build_batch([chunk], groups=groups), cache)
    return logits[0]


@pytest.mark.parametrize("name", ["folder", "windows"])
async def test_hnd_gives_the_text_of_transformers(
    name: str, request: pytest.FixtureRequest, served: dict[Path, PagedModel]
) -> None:
    folder = request.getfixturevalue(name)
    served[folder] = load_model(folder, kv_layout="HND")
    prompts = [prompt(length, seed=length) for length in (1, 17, 48, 100)]
    async with running(folder) as harness:
        outputs = await asyncio.gather(*(harness.generate(tokens, max_tokens=20, n=2) for tokens in prompts))
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens == [reference_text(folder, tuple(tokens), 20)] * 2


@pytest.mark.parametrize("format_", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["folder", "windows"])
async def test_fp8_is_close_in_logits_and_its_text_depends_on_no_other_request(
    name: str, format_: str, request: pytest.FixtureRequest, served: dict[Path, PagedModel]
) -> None:
    folder = request.getfixturevalue(name)
    model = served[folder] = load_model(folder, kv_cache_dtype=format_)
    tokens = prompt(100, seed=7)
    with torch.no_grad():
        expected = reference_model(folder)(torch.tensor([tokens])).logits[0, -1]
    difference = float((logits_of(model, tokens) - expected).norm() / expected.norm())
    assert 1e-3 < difference < LOGITS_DIFFER_MAX[format_]
    prompts = [prompt(length, seed=length) for length in (1, 17, 48, 100)]
    alone = []
    for own in prompts:
        async with running(folder) as harness:
            alone.append((await harness.generate(own, max_tokens=20)).tokens[0])
    # First all prompts run in one batch, then again with cache hits and two samples each.
    async with running(folder, blocks=40) as harness:
        outputs = await asyncio.gather(*(harness.generate(own, max_tokens=20) for own in prompts))
        again = await asyncio.gather(*(harness.generate(own, max_tokens=20, n=2) for own in prompts))
    assert [output.tokens for output in outputs] == [[text] for text in alone]
    assert [output.tokens for output in again] == [[text] * 2 for text in alone]


async def test_a_trained_model_goes_on_with_the_same_text_in_e4m3(served: dict[Path, PagedModel]) -> None:
    folder = Path(__file__).parents[2] / "models" / "demo"
    served[folder] = load_model(folder, kv_cache_dtype="fp8_e4m3")
    async with running(folder) as harness:
        tokens = harness.engine.tokenizer.encode("The pages of a sequence")
        output = await harness.generate(tokens, max_tokens=12)
    assert output.tokens[0] == reference_text(folder, tuple(tokens), 12)


def with_scales(folder: Path, to: Path, scales: dict[str, torch.Tensor]) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    save_file(load_file(folder / "model.safetensors") | scales, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_pages_are_divided_by_the_scales_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.{}.self_attn.{}"
    scales = {
        name.format(0, "k_scale"): torch.tensor(0.125),
        name.format(0, "attn.v_scale"): torch.tensor([0.5]),
        name.format(1, "kv_scale"): torch.tensor(2.0),
    }
    scaled = with_scales(folder, tmp_path / "scaled", scales)
    assert read_scales(scaled) == {0: Scales(0.125, 0.5), 1: Scales(2.0, 2.0)}
    assert read_scales(folder) == {}
    models = [load_model(each, kv_cache_dtype="fp8_e4m3") for each in (folder, scaled)]
    assert models[0].cache_spec.layout != models[1].cache_spec.layout
    stored = []
    for model in models:
        cache = KVCache(model.cache_spec, 2)
        chunk = Chunk(prompt(16, seed=1), 0, [[1]], needs_logits=True)
        model.forward(build_batch([chunk], groups=model.cache_spec.groups), cache)
        stored.append(cache.layers[0].pages[1].float())
    # Scaling by powers of two keeps the mantissas, so only subnormals may differ.
    factors = torch.tensor([8.0, 2.0]).view(2, 1, 1, 1)
    torch.testing.assert_close(stored[0] * factors, stored[1], rtol=0, atol=8 * 2.0**-10)


@pytest.mark.parametrize("value", [[0.0], [float("nan")], [1.0, 2.0]])
def test_what_is_no_scale_is_refused_by_name(folder: Path, tmp_path: Path, value: list[float]) -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor(value)}
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_scale must be one number above 0"):
        load_model(with_scales(folder, tmp_path / "scaled", scales), kv_cache_dtype="fp8_e4m3")


def test_unknown_formats_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError, match="'fp4'"):
        load_model(folder, kv_cache_dtype="fp4")
    with pytest.raises(ValueError, match="'NDH'"):
        load_model(folder, kv_layout="NDH")
