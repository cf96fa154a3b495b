"""Shipped specializations: the list has some for every kernel, and the table of compiled ones has all of them."""

from __future__ import annotations

import ast
import csv
import itertools
from pathlib import Path

import pytest
from quire_kernels.compilation.configurations import (
    ARCHITECTURES,
    ELEMENT_BYTES,
    FP8_TYPES,
    SHARED_MEMORY_MAX,
    KernelConfiguration,
)
from quire_kernels.compilation.shipped import SHIPPED
from quire_kernels.shared.decode_work import decode_tiling
from quire_kernels.shared.launch import Tiling
from quire_kernels.shared.mla_work import mla_tiling
from quire_kernels.shared.prefill_rows import prefill_tiling

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "benchmarks" / "results" / "kernels_compiled.csv"
KERNELS = ROOT / "worker_service" / "quire_kernels"


class Kernel:
    """Stands for the object that @triton.jit makes."""

    __name__ = "kernel"
    arg_names = ("x_ptr", "n", "BLOCK")


def launched_kernels() -> set[str]:
    """Returns the names of all kernels that the library launches, as in `append_kernel[grid](...)`."""
    found = set()
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                found.add(ast.unparse(node.func.value))
    return {name for name in found if name.endswith("_kernel")} | {"kernel"} & found


def test_every_kernel_that_is_launched_ships() -> None:
    shipped = {configuration.kernel.__name__ for configuration in SHIPPED}
    assert len(shipped) >= 14
    # One launch serves both append kernels. Its variable is called `kernel`.
    assert launched_kernels() - {"kernel"} == shipped - {"append_kernel", "append_slots_kernel"}


def test_the_committed_table_lists_exactly_what_ships() -> None:
    shipped = {
        (configuration.title, architecture) for configuration in SHIPPED for architecture in configuration.architectures
    }
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {(f"{row['kernel']} {row['configuration']}", row["architecture"]) for row in rows} == shipped
    assert all(int(row["spilled"]) == 0 for row in rows)
    assert all(int(row["shared_bytes"]) <= SHARED_MEMORY_MAX[row["architecture"]] for row in rows)


def tiling_of(configuration: KernelConfiguration) -> tuple[object, ...]:
    """Returns the properties that determine register use: chip, element size and dtype, mask or not, and tiling."""
    query, key = (configuration.signature[name].strip("*") for name in ("q", "k"))
    cache = key if ELEMENT_BYTES[key] == 1 else None
    sizes = configuration.constexprs
    tiling = Tiling(sizes["BLOCK_M"], sizes["BLOCK_N"], configuration.num_warps, configuration.num_stages)
    return configuration.architectures, ELEMENT_BYTES[query], cache, sizes.get("MASK_KIND", 0) > 0, tiling


def test_every_tiling_that_a_launcher_can_choose_is_compiled() -> None:
    dims = [(dim, dim) for dim in (16, 64, 72, 80, 96, 128, 160, 192, 224, 256)] + [(192, 128), (256, 64)]
    chosen: dict[str, set[tuple[object, ...]]] = {"decode_paged_kernel": set(), "prefill_kernel": set()}
    caches = [(chip, cache) for chip in ARCHITECTURES for cache in (None, *FP8_TYPES[chip])]
    for (chip, cache), element_bytes, (dim, v_dim) in itertools.product(caches, (2, 4), dims):
        what, is_fp8 = ((chip,), element_bytes, cache), cache is not None
        for group in (1, 2, 5, 7, 8, 16, 17, 32, 48, 64, 128):
            decode = decode_tiling(chip, group, dim, v_dim, element_bytes, is_fp8=is_fp8)
            chosen["decode_paged_kernel"].add((*what, False, decode))
        for rows, masked in itertools.product((0, 1, 16, 17, 64, 65, 4096), (False, True)):
            prefill = prefill_tiling(chip, rows, dim, v_dim, element_bytes, masked=masked, is_fp8=is_fp8)
            chosen["prefill_kernel"].add((*what, masked, prefill))
    for kernel, tilings in chosen.items():
        compiled = {tiling_of(found) for found in SHIPPED if found.kernel.__name__ == kernel and has_options(found)}
        assert tilings == compiled


def has_options(configuration: KernelConfiguration) -> bool:
    """Returns whether all options are on, which takes the most registers."""
    return {"sinks", "slopes", "k_scale", "v_scale"} <= configuration.signature.keys()


def test_every_tiling_of_latent_attention_is_compiled() -> None:
    compiled = {
        (found.architectures[0], ELEMENT_BYTES[found.signature["ckv"].strip("*")], found.constexprs["BLOCK_M"])
        for found in SHIPPED
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
