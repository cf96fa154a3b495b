"""Errors of attention against float64, by dtype: the Triton kernels, and the worker's path on a CPU.

Kernels run on a GPU where there is one, else in Triton's interpreter on the CPU. The interpreter multiplies half
precision in float32, and truncates to bfloat16 where a GPU rounds. A GPU also rounds the weights of the second product.
So a GPU's errors may be larger or smaller.

    attention     normal random numbers, against float64 on the same rounded queries and cache: the kernel's error
    fp8 cache     the same, against the bytes in the cache, and against the numbers before rounding: the error of fp8
    append        the contents of an fp8 cache times its scale, against the appended numbers; fp8 is e4m3 or e5m2
    on the CPU    the worker's path without a GPU, which returns no lse
    sample        distance of the number that drew a token from the token's interval in [0, 1); 0 is inside

`max_abs` is the largest error. `relative_rms` is the root mean square of the errors, divided by that of the expected
results. lse is in base 2. Tests allow an error of `tolerance` times 1 + |expected result|
(`quire_kernels/shared/reference.py`); `of_tolerance` is the largest share of that.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # Must be set before the first kernel is imported.

from quire.types import GroupKind, GroupSpec  # noqa: E402
from quire_kernels import (  # noqa: E402
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    append_paged_kv_cache,
    merge_states,
)
from quire_kernels.extra import sample  # noqa: E402
from quire_kernels.ops.decode_paged import decode_paged_reference  # noqa: E402
from quire_kernels.ops.merge_states import merge_states_reference  # noqa: E402
from quire_kernels.ops.mla_paged import mla_paged_reference  # noqa: E402
from quire_kernels.ops.prefill_attention import prefill_paged_reference, prefill_ragged_reference  # noqa: E402
from quire_kernels.ops.sampling import weights_reference  # noqa: E402
from quire_kernels.shared.fp8 import E4M3, E5M2, FP8_MAX, quantise_reference  # noqa: E402
from quire_kernels.shared.options import AttentionOptions  # noqa: E402
from quire_kernels.shared.paged_cache import unpack_paged_cache  # noqa: E402
from quire_kernels.shared.prefill_rows import Masking  # noqa: E402
from quire_kernels.shared.reference import (  # noqa: E402
    CPU_TOLERANCE,
    LSE_TOLERANCE,
    MERGE_TOLERANCE,
    SAMPLE_TOLERANCE,
    TOLERANCE,
)
from quire_worker.attention import TorchPagedAttention  # noqa: E402
from quire_worker.cache import PageSpec  # noqa: E402
from quire_worker.model.batch import Chunk, build_batch  # noqa: E402
from report import add_output_arguments, publish  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 17, 400)
NEW = (1, 17, 24)  # for each sequence: the tokens at its end that prefill computes
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 128, 16
MLA_HEADS, CKV_DIM, KPE_DIM = 4, 512, 64
VOCABULARY = 5000
ON_CPU = ", on the CPU"
FORMATS = {E4M3: "e4m3", E5M2: "e5m2"}

Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of one operation; the module's docstring explains them."""

    operation: str
    dtype: str
    against: str
    max_abs: float
    relative_rms: float | None
    lse_max_abs: float | None = None
    tolerance: float | None = None
    of_tolerance: float | None = None

    def row(self) -> dict[str, object]:
        """Returns the published row. Values that differ from run to run are rounded."""
        numbers = {
            name: "" if value is None else float(f"{value:.2g}")
            for name in ("max_abs", "relative_rms", "lse_max_abs", "tolerance", "of_tolerance")
            for value in [getattr(self, name)]
        }
        where = "interpreter" if DEVICE.type == "cpu" else torch.cuda.get_device_name()
        where = "CPU" if self.operation.endswith(ON_CPU) else where
        return {"operation": self.operation, "dtype": self.dtype, "against": self.against, **numbers, "on": where}


def errors(
    operation: str,
    dtype: str,
    actual: Result,
    expected: Result,
    *,
    against: str = "float64",
    tolerance: float | None = None,
) -> Errors:
    """Returns the errors of outputs and of their log-sum-exp (lse)."""
    error, lse = (actual[0].double() - expected[0]).abs(), (actual[1].double() - expected[1]).abs()
    rms = float(error.square().mean().sqrt() / expected[0].square().mean().sqrt())
    share = None if tolerance is None else float((error / (1 + expected[0].abs())).max()) / tolerance
    return Errors(operation, dtype, against, float(error.max()), rms, float(lse.max()), tolerance, share)


def name_of(dtype: torch.dtype) -> str:
    """Returns the dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


@dataclass(eq=False)
class Scene:
    """Requests of `LENGTHS`, with pages in a random order."""

    dtype: torch.dtype
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        counts = [-(-length // PAGE_SIZE) for length in LENGTHS]
        last = [(length - 1) % PAGE_SIZE + 1 for length in LENGTHS]
        self.table = (starts(counts), torch.randperm(sum(counts)).to(DEVICE, torch.int32), index(last))
        self.pages = torch.randn(sum(counts), 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=DEVICE).to(self.dtype)
        self.workspace = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)

    def queries(self, tokens: int) -> torch.Tensor:
        """Draws normal numbers for the queries."""
        return torch.randn(tokens, HEADS, HEAD_DIM, device=DEVICE).to(self.dtype)

    def decode(self, q: torch.Tensor, cache: torch.Tensor, **scales: Any) -> Result:
        """Computes decode with the wrapper."""
        wrapper = BatchDecodeWithPagedKVCacheWrapper(self.workspace)
        heads = (HEADS, KV_HEADS, HEAD_DIM)
        wrapper.plan(*self.table, *heads, PAGE_SIZE, q_data_type=q.dtype, kv_data_type=cache.dtype)
        return pair(wrapper.run(q, cache, return_lse=True, **scales))

    def prefill(self, q: torch.Tensor, cache: torch.Tensor, **scales: Any) -> Result:
        """Computes causal prefill with the wrapper."""
        wrapper = BatchPrefillWithPagedKVCacheWrapper(self.workspace)
        sizes = (HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
        wrapper.plan(starts(NEW), *self.table, *sizes, causal=True, q_data_type=q.dtype, kv_data_type=cache.dtype)
        return pair(wrapper.run(q, cache, return_lse=True, **scales))

    def decode_reference(self, q: torch.Tensor, cache: torch.Tensor, options: AttentionOptions) -> Result:
        """Computes decode in float64."""
        return decode_paged_reference(q, unpack_paged_cache(cache), *self.table, options)

    def prefill_reference(self, q: torch.Tensor, cache: torch.Tensor, options: AttentionOptions) -> Result:
        """Computes causal prefill in float64."""
        masking = Masking(causal=True)
        return prefill_paged_reference(q, unpack_paged_cache(cache), starts(NEW), *self.table, options, masking)


def index(values: Any) -> torch.Tensor:
    """Returns the values as int32 on the device."""
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def starts(counts: Any) -> torch.Tensor:
    """Returns the running sums of `counts`, int32 `[counts + 1]`, starting at 0."""
    return index([0, *counts]).cumsum(0, dtype=torch.int32)


def pair(result: Any) -> Result:
    """Returns outputs and lse from the result of `run(..., return_lse=True)`."""
    assert isinstance(result, tuple)
    return result


def scale_of(fp8: torch.dtype) -> torch.Tensor:
    """Returns a scale that maps the largest of normally distributed numbers near the format's largest number."""
    return torch.full((KV_HEADS,), 4.5 / FP8_MAX[fp8], device=DEVICE)


def paged(dtype: torch.dtype) -> Iterator[Errors]:
    """Yields errors of decode and prefill, with a cache in the queries' dtype and in each fp8 format."""
    scene, options = Scene(dtype), AttentionOptions(HEAD_DIM**-0.5)
    tolerance = TOLERANCE[dtype]
    for title, run, reference, tokens in (
        ("decode", scene.decode, scene.decode_reference, len(LENGTHS)),
        ("prefill", scene.prefill, scene.prefill_reference, sum(NEW)),
    ):
        q = scene.queries(tokens)
        right = reference(q, scene.pages, options)
        yield errors(title, name_of(dtype), run(q, scene.pages), right, tolerance=tolerance)
        for fp8, name in FORMATS.items():
            scale = scale_of(fp8)
            cache = quantise_reference(scene.pages, scale[0], fp8)
            scaled = AttentionOptions(HEAD_DIM**-0.5, k_scale=scale, v_scale=scale)
            actual = run(q, cache, k_scale=scale, v_scale=scale)
            dtypes, held = f"{name_of(dtype)}, {name} cache", "float64 on the fp8 cache"
            yield errors(title, dtypes, actual, reference(q, cache, scaled), against=held, tolerance=tolerance)
            yield errors(title, dtypes, actual, right, against="float64 before quantising")


def on_cpu(dtype: torch.dtype) -> Iterator[Errors]:
    """Yields errors of the worker's path on a CPU: decode, and chunks of prompts."""
    scene, scale = Scene(dtype), HEAD_DIM**-0.5
    tables = [pages.tolist() for pages in scene.table[1].split(scene.table[0].diff().tolist())]
    spec = PageSpec(KV_HEADS, HEAD_DIM, PAGE_SIZE, dtype)
    for title, new, reference in (
        ("decode", (1,) * len(LENGTHS), scene.decode_reference),
        ("prefill", NEW, scene.prefill_reference),
    ):
        q = scene.queries(sum(new))
        chunks = [
            Chunk([0] * count, length - count, [table], needs_logits=True)
            for count, length, table in zip(new, LENGTHS, tables, strict=True)
        ]
        batch = build_batch(chunks, groups=[GroupSpec(GroupKind.FULL_ATTENTION, PAGE_SIZE)])
        plan = TorchPagedAttention().plan(batch.attention[0], spec)
        expected = reference(q, scene.pages, AttentionOptions(scale))
        actual = (plan.attend(q, scene.pages, scale=scale), expected[1])
        found = errors(title + ON_CPU, name_of(dtype), actual, expected, tolerance=CPU_TOLERANCE[dtype])
        yield replace(found, lse_max_abs=None)


def ragged(dtype: torch.dtype) -> Errors:
    """Returns errors of prefill without pages: contiguous keys of 192 dims, values of 128."""
    q, k, v = (
        torch.randn(sum(counts), KV_HEADS, dim, device=DEVICE).to(dtype)
        for counts, dim in ((NEW, 192), (LENGTHS, 192), (LENGTHS, 128))
    )
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(8, dtype=torch.uint8, device=DEVICE))
    wrapper.plan(starts(NEW), starts(LENGTHS), KV_HEADS, KV_HEADS, 192, 128, causal=True, q_data_type=dtype)
    actual = pair(wrapper.run(q, k, v, return_lse=True))
    options = AttentionOptions(192**-0.5)
    expected = prefill_ragged_reference(q, k, v, starts(NEW), starts(LENGTHS), options, Masking(causal=True))
    return errors("ragged prefill", name_of(dtype), actual, expected, tolerance=TOLERANCE[dtype])


def latent(dtype: torch.dtype, new: tuple[int, ...], title: str) -> Errors:
    """Returns errors of latent attention over pages."""
    scene = Scene(dtype)
    pages, scale = scene.pages.shape[0], (CKV_DIM + KPE_DIM) ** -0.5
    ckv, kpe = (torch.randn(pages, PAGE_SIZE, dim, device=DEVICE).to(dtype) for dim in (CKV_DIM, KPE_DIM))
    q_nope, q_pe = (torch.randn(sum(new), MLA_HEADS, dim, device=DEVICE).to(dtype) for dim in (CKV_DIM, KPE_DIM))
    wrapper = BatchMLAPagedAttentionWrapper(scene.workspace)
    sizes = (MLA_HEADS, CKV_DIM, KPE_DIM, PAGE_SIZE)
    indptr, indices, _ = scene.table
    wrapper.plan(starts(new), indptr, indices, index(LENGTHS), *sizes, True, scale, dtype, dtype)
    actual = pair(wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True))
    expected = mla_paged_reference(q_nope, q_pe, (ckv, kpe), starts(new), scene.table, sm_scale=scale, causal=True)
    return errors(title, name_of(dtype), actual, expected, tolerance=TOLERANCE[dtype])


def merged(dtype: torch.dtype) -> Errors:
    """Merges five attention states and returns the errors."""
    v = torch.randn(64, 5, HEADS, HEAD_DIM, device=DEVICE).to(dtype)
    s = 5 * torch.randn(64, 5, HEADS, device=DEVICE)
    right, lse = merge_states_reference(v.double(), s)
    expected = (right, lse.double())
    return errors("merge_states", name_of(dtype), merge_states(v, s), expected, tolerance=MERGE_TOLERANCE[dtype])


def quantised(dtype: torch.dtype) -> Iterator[Errors]:
    """Yields errors of values read back from an fp8 cache, times the scale."""
    tokens = torch.randn(2, 64, KV_HEADS, HEAD_DIM, device=DEVICE).to(dtype)
    table = (index(range(4)), starts([4]), index([PAGE_SIZE]))
    requests, positions = index([0] * 64), index(range(64))
    nothing = torch.zeros(1, device=DEVICE)
    for fp8, name in FORMATS.items():
        cache, scale = torch.zeros(4, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=DEVICE).to(fp8), scale_of(fp8)
        append_paged_kv_cache(tokens[0], tokens[1], requests, positions, cache, *table, "NHD", scale, scale)
        held = cache.float().double().movedim(1, 0).flatten(1, 2) * scale.double()[:, None]
        dtypes = f"{name_of(dtype)}, {name} cache"
        found = errors("append", dtypes, (held, nothing), (tokens.double(), nothing.double()))
        yield Errors(found.operation, found.dtype, "what was appended", found.max_abs, found.relative_rms)


def drawn(dtype: torch.dtype) -> Errors:
    """Returns how far random numbers lie outside the intervals, in [0, 1), of the tokens that they drew."""
    rows = 4
    logits = (3 * torch.randn(rows, VOCABULARY, device=DEVICE)).to(dtype)
    uniform = torch.rand(rows, device=DEVICE)
    tokens = sample(logits, uniform, 0.8, 1000, 0.95, 0.001).tolist()
    outside = 0.0
    for row, token in enumerate(tokens):
        weights = weights_reference(logits[row], 0.8, 1000, 0.95, 0.001)
        end, number = float(weights[: token + 1].sum()), float(uniform[row])
        begin = end - float(weights[token])
        outside = max(outside, begin - number, number - end)
    share = outside / SAMPLE_TOLERANCE
    return Errors("sample, probability", name_of(dtype), "float64", outside, None, None, SAMPLE_TOLERANCE, share)


def main() -> None:
    """Measures everything, and prints or writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name_of(dtype) for dtype in DTYPES]
    parser.add_argument("--dtypes", nargs="+", choices=names, default=names, help="(default: all)")
    add_output_arguments(parser)
    options = parser.parse_args()
    dtypes = [dtype for dtype in DTYPES if name_of(dtype) in options.dtypes]
    torch.manual_seed(0)
    found: list[Errors] = []
    for dtype in dtypes:
        found += paged(dtype)
        found.append(ragged(dtype))
        found.append(latent(dtype, (1,) * len(LENGTHS), "latent decode"))
        found.append(latent(dtype, NEW, "latent prefill"))
        found += [merged(dtype), *quantised(dtype), drawn(dtype)]
    if DEVICE.type == "cpu":
        for dtype in dtypes:
            found += on_cpu(dtype)
    rows = [error.row() | {"lse_tolerance": "" if error.lse_max_abs is None else LSE_TOLERANCE} for error in found]
    publish("Errors of attention", rows, [], as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
