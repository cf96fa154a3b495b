"""What ships: every kernel declares its specialisations, and the table of compiled ones lists them all."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from quire_worker.kernels.configurations import SHARED_MEMORY_MAX, KernelConfiguration, collect

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "benchmarks" / "results" / "kernels_compiled.csv"
KERNELS = ROOT / "worker_service" / "quire_worker" / "kernels"


class Kernel:
    """Stands for what @triton.jit makes."""

    __name__ = "_kernel"
    arg_names = ("x_ptr", "n", "BLOCK")


def test_every_file_that_launches_a_kernel_declares_configurations() -> None:
    launchers = [path for path in KERNELS.glob("*.py") if "_kernel[" in path.read_text(encoding="utf-8")]
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


def test_a_configuration_names_each_argument_of_its_kernel_once() -> None:
    whole = {"signature": {"x_ptr": "*fp32", "n": "i32"}, "constexprs": {"BLOCK": 8}}
    assert KernelConfiguration(Kernel(), "whole", **whole).title == "kernel whole"
    for change in ({"signature": {"x_ptr": "*fp32"}}, {"constexprs": {"BLOCK": 8, "n": 1}}, {"aligned": {"BLOCK"}}):
        with pytest.raises(ValueError, match=r"BLOCK|takes"):
            KernelConfiguration(Kernel(), "not whole", **(whole | change))  # type: ignore[arg-type]
