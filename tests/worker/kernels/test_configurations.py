"""What ships: every kernel declares its specialisations, and the table of compiled ones lists them all."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pytest
from quire_kernels.shared.configurations import (
    ARCHITECTURES,
    ELEMENT_BYTES,
    SHARED_MEMORY_MAX,
    KernelConfiguration,
    collect,
)
from quire_kernels.shared.decode_work import decode_tiling
from quire_kernels.shared.launch import Tiling
from quire_kernels.shared.mla_work import mla_tiling
from quire_kernels.shared.prefill_rows import prefill_tiling

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "benchmarks" / "results" / "kernels_compiled.csv"
KERNELS = ROOT / "worker_service" / "quire_kernels"


class Kernel:
    """Stands for what @triton.jit makes."""

    __name__ = "_kernel"
    arg_names = ("x_ptr", "n", "BLOCK")


def test_every_file_that_launches_a_kernel_declares_configurations() -> None:
    launchers = [path for path in KERNELS.rglob("*.py") if "_kernel[" in path.read_text(encoding="utf-8")]
    assert len(launchers) >= 6
    silent = [path.name for path in launchers if "CONFIGURATIONS" not in path.read_text(encoding="utf-8")]
    assert not silent


def test_titles_are_unique_and_the_committed_table_lists_exactly_them() -> None:
    shipped = {
        (configuration.title, architecture)
        for configuration in collect()
        for architecture in configuration.architectures
    }
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {(f"{row['kernel']} {row['configuration']}", row["architecture"]) for row in rows} == shipped
    assert all(int(row["spilled"]) == 0 for row in rows)
    assert all(int(row["shared_bytes"]) <= SHARED_MEMORY_MAX[row["architecture"]] for row in rows)


def tiling_of(configuration: KernelConfiguration) -> tuple[object, ...]:
    """What decides about registers: chip, sizes of elements, whether there is a mask, and the tiling."""
    query, key = (ELEMENT_BYTES[configuration.signature[name].strip("*")] for name in ("q", "k"))
    sizes = configuration.constexprs
    tiling = Tiling(sizes["BLOCK_M"], sizes["BLOCK_N"], configuration.num_warps, configuration.num_stages)
    return configuration.architectures, query, key == 1, sizes.get("MASK_KIND", 0) > 0, tiling


def test_every_tiling_that_a_launcher_can_choose_is_compiled() -> None:
    dims = [(dim, dim) for dim in (16, 64, 72, 80, 96, 128, 160, 192, 224, 256)] + [(192, 128), (256, 64)]
    chosen: dict[str, set[tuple[object, ...]]] = {"decode_paged_kernel": set(), "prefill_paged_kernel": set()}
    for chip, element_bytes, is_fp8, (dim, v_dim) in itertools.product(ARCHITECTURES, (2, 4), (False, True), dims):
        what = ((chip,), element_bytes, is_fp8)
        for group in (1, 2, 5, 7, 8, 16, 17, 32, 48, 64, 128):
            decode = decode_tiling(chip, group, dim, v_dim, element_bytes, is_fp8=is_fp8)
            chosen["decode_paged_kernel"].add((*what, False, decode))
        for rows, masked in itertools.product((0, 1, 16, 17, 64, 65, 4096), (False, True)):
            prefill = prefill_tiling(chip, rows, dim, v_dim, element_bytes, masked=masked, is_fp8=is_fp8)
            chosen["prefill_paged_kernel"].add((*what, masked, prefill))
    for kernel, tilings in chosen.items():
        compiled = {tiling_of(found) for found in collect() if found.kernel.__name__ == kernel and has_options(found)}
        assert tilings == compiled


def has_options(configuration: KernelConfiguration) -> bool:
    """All at once, which is what takes most registers."""
    return {"sinks", "slopes", "k_scale", "v_scale"} <= configuration.signature.keys()


def test_every_tiling_of_latent_attention_is_compiled() -> None:
    compiled = {
        (found.architectures[0], ELEMENT_BYTES[found.signature["ckv"].strip("*")], found.constexprs["BLOCK_M"])
        for found in collect()
        if found.kernel.__name__ == "mla_paged_kernel" and found.constexprs["PAGE_SIZE"] == 16
    }
    for chip, heads, element_bytes in itertools.product(ARCHITECTURES, (1, 8, 16, 17, 64, 128), (2, 4)):
        assert (chip, element_bytes, mla_tiling(chip, heads, element_bytes).block_m) in compiled


def test_a_configuration_names_each_argument_of_its_kernel_once() -> None:
    whole = {"signature": {"x_ptr": "*fp32", "n": "i32"}, "constexprs": {"BLOCK": 8}}
    assert KernelConfiguration(Kernel(), "whole", **whole).title == "kernel whole"
    for change in ({"signature": {"x_ptr": "*fp32"}}, {"constexprs": {"BLOCK": 8, "n": 1}}, {"aligned": {"BLOCK"}}):
        with pytest.raises(ValueError, match=r"BLOCK|takes"):
            KernelConfiguration(Kernel(), "not whole", **(whole | change))  # type: ignore[arg-type]
