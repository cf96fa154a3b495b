"""Compiles every shipped specialisation of every kernel for every architecture, without a GPU, and checks the result.

    python scripts/compile_kernels.py                    compile, print, write benchmarks/results/kernels_compiled.csv
    python scripts/compile_kernels.py --check            compile, print and compare with the committed table
    python scripts/compile_kernels.py --check --share 4  the same for a random quarter of the kernels
    python scripts/compile_kernels.py --only append      compile and print kernels with this word in the title

Fails if a kernel spills registers, or needs more shared memory than the chip has. Such kernels compile without an
error, and too much shared memory fails only at the launch. A Gluon kernel must also copy by TMA, and compute
exponentials while a product runs. Only its machine code shows whether the assembler kept that order.

Registers and spills depend on the ptxas and LLVM of the installed Triton. So the table names its Triton, and `--check`
compares numbers only under the same Triton. The set of kernels is always compared.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# Triton reads this variable at its import. Unset it, because interpreted functions cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import triton
from quire_kernels.compilation.configurations import ARCHITECTURES, SHARED_MEMORY_MAX, KernelConfiguration
from quire_kernels.compilation.shipped import SHIPPED
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TABLE = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "kernels_compiled.csv"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True, slots=True)
class Row:
    """The resources of one specialization on one architecture."""

    kernel: str
    configuration: str
    architecture: str
    num_warps: int
    num_stages: int
    registers: int  # per thread
    spilled: int  # bytes per thread that were moved from registers to memory
    shared_bytes: int  # shared memory per program
    triton: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns the specialization and the architecture."""
        return self.kernel, self.configuration, self.architecture

    def complaints(self) -> list[str]:
        """Returns the reasons why this kernel must not ship."""
        title = " ".join(self.key)
        found = []
        if self.spilled:
            found.append(f"{title} spills {self.spilled} bytes")
        if self.shared_bytes > SHARED_MEMORY_MAX[self.architecture]:
            limit = SHARED_MEMORY_MAX[self.architecture]
            found.append(f"{title} needs {self.shared_bytes} bytes of shared memory, but the GPU has {limit}")
        return found


def main() -> int:
    """Compiles, prints and compares or writes. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with the committed table instead of writing it")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="compile only kernels whose title contains this text; writes nothing"
    )
    parser.add_argument(
        "--share", type=int, default=1, metavar="N", help="compile one in N kernels, drawn at random; writes nothing"
    )
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    work = [
        (number, architecture)
        for number, configuration in enumerate(SHIPPED)
        if arguments.only in configuration.title
        for architecture in arguments.architectures
        if architecture in configuration.architectures
    ]
    drawn = random.randrange(arguments.share)
    work = work[drawn :: arguments.share]
    rows, complaints = [], []
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for result in pool.imap(_compile_one, work, chunksize=1):
            if isinstance(result, Row):
                rows.append(result)
                complaints += result.complaints()
                print(",".join(str(value) for value in asdict(result).values()), flush=True)
            else:
                complaints.append(result)
                print(result, flush=True)
    is_whole = not arguments.only and arguments.share == 1 and arguments.architectures == list(ARCHITECTURES)
    if arguments.check:
        complaints += _differences(rows, _read_table())
    elif is_whole and not complaints:
        _write_table(rows)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    part = f", those from number {drawn} on of every {arguments.share}" if arguments.share > 1 else ""
    print(f"{len(rows)} compiled{part}, {len(complaints)} complaints")
    return 1 if complaints else 0


def _compile_one(work: tuple[int, str]) -> Row | str:
    """Returns a row, or the reason why there is none. `work` has the number of a configuration, because kernels cannot
    be sent to another process."""
    number, architecture = work
    configuration = SHIPPED[number]
    try:
        return compile_configuration(configuration, architecture)
    except Exception as error:
        last = str(error).strip().splitlines()[-1:] or [""]
        return f"{configuration.title} {architecture}: {type(error).__name__}: {last[0]}"


def compile_configuration(configuration: KernelConfiguration, architecture: str) -> Row:
    """Compiles one specialization for one architecture."""
    kernel = configuration.kernel
    places = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    source = (GluonASTSource if configuration.is_gluon else ASTSource)(
        fn=kernel,
        signature={name: configuration.signature.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={places[name]: value for name, value in configuration.constexprs.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in configuration.aligned},
    )
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    if configuration.maxnreg is not None:
        options["maxnreg"] = configuration.maxnreg
    compiled = triton.compile(source, target=TARGETS[architecture], options=options)
    registers, spilled = _amd_usage(compiled) if architecture.startswith("gfx") else _nvidia_usage(compiled)
    if configuration.is_gluon:
        check_overlap(_cuobjdump(compiled, "--dump-sass"), in_group=configuration.has_products_in_flight)
    return Row(
        kernel=kernel.__name__,
        configuration=configuration.name,
        architecture=architecture,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
        registers=registers,
        spilled=spilled,
        shared_bytes=compiled.metadata.shared,
        triton=triton.__version__,
    )


def check_overlap(machine_code: str, *, in_group: bool) -> None:
    """Refuses a kernel for Hopper that runs its copies, products and exponentials one after another.

    Args:
        machine_code: the kernel's machine code.
        in_group: whether each group of warps must overlap its own products and exponentials.

    Raises:
        ValueError: the kernel does not copy by TMA, or has no exponential between a wait that leaves a product in
            flight and the next wait.
    """
    if "UTMALDG" not in machine_code:
        raise ValueError("no copy uses TMA")
    parts = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", machine_code)
    if in_group and not any(
        int(left, 16) and "MUFU.EX2" in code for left, code in zip(parts[1::2], parts[2::2], strict=True)
    ):
        raise ValueError("no exponential is computed while a product is in flight")


def _cuobjdump(compiled: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _nvidia_usage(compiled: Any) -> tuple[int, int]:
    """Returns registers per thread and bytes of local memory (spills, and a stack if there is one), from the cubin."""
    text = _cuobjdump(compiled, "--dump-resource-usage")
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _amd_usage(compiled: Any) -> tuple[int, int]:
    """Returns vector registers per thread and bytes of scratch memory, from the metadata at the end of the assembly.

    Spilled scalar registers do not count, because they stay in lanes of vector registers.
    """
    text = compiled.asm["amdgcn"]
    usage = {
        name: int(value) for name, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text)
    }
    return usage["vgpr_count"], usage["private_segment_fixed_size"]


def _read_table() -> list[Row]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        numbers = {item.name for item in fields(Row) if item.type == "int"}
        rows = []
        for line in csv.DictReader(file):
            values: dict[str, Any] = {name: int(value) if name in numbers else value for name, value in line.items()}
            rows.append(Row(**values))
        return rows


def _write_table(rows: list[Row]) -> None:
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [item.name for item in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _differences(rows: list[Row], committed: list[Row]) -> list[str]:
    """Returns the differences between the compiled rows and the table, and between its kernels and the shipped ones."""
    before = {row.key: row for row in committed}
    shipped = {(each.kernel.__name__, each.name, chip) for each in SHIPPED for chip in each.architectures}
    found = [f"{' '.join(key)} is not in {TABLE.name}" for key in shipped - before.keys()]
    found += [f"{' '.join(key)} is in {TABLE.name} only" for key in before.keys() - shipped]
    for row in rows:
        known = before.get(row.key)
        if known is not None and row != known and row.triton == known.triton:
            found.append(f"{' '.join(row.key)}: now {row}, in {TABLE.name} {known}")
    return sorted(found)


if __name__ == "__main__":
    sys.exit(main())
