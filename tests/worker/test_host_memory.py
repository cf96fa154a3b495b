"""The memory limits of a worker: its own limit, and the limits of its control group and of all groups above."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from quire_worker import host_memory

GIB = 1 << 30
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
V2 = "30 23 0:26 {root} {top} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} {top} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
CPU = "32 31 0:29 / /elsewhere rw - cgroup cgroup rw,cpu\n"


def scene(folder: Path, cgroup: str, mounts: str, **limits: str) -> list[int]:
    """Writes control groups with these limits, and returns the limits that are read, the innermost first."""
    proc, top = folder / "proc", folder / "a mount"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mounts.replace("{top}", str(top).replace(" ", "\\040")))
    for path, limit in limits.items():
        file = top / path.replace("__", "/").replace("DOT", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
    groups = host_memory.control_groups(proc)
    return [limit for group in groups for limit in host_memory._limits(group)]


def test_the_own_group_and_those_above_it_count_in_version_2(tmp_path: Path) -> None:
    limits = {"slice__memoryDOTmax": "8", "slice__job__memoryDOTmax": "max", "slice__job__memoryDOThigh": "5",
              "slice__job__step__memoryDOTmax": "6", "other__memoryDOTmax": "1"}  # fmt: skip
    assert scene(tmp_path, "0::/slice/job/step\n", V2.format(root="/", top="{top}") + CPU, **limits) == [6, 5, 8]


def test_and_in_version_1_beside_a_version_2_without_memory(tmp_path: Path) -> None:
    limits = {"slurm__memoryDOTlimit_in_bytes": "9", "slurm__uid__memoryDOTlimit_in_bytes": "7"}
    mounts = CPU + V1.format(root="/", top="{top}") + V2.format(root="/", top="/nowhere")
    assert scene(tmp_path, "4:memory:/slurm/uid\n1:cpu:/x\n0::/init.scope\n", mounts, **limits) == [7, 9]


def test_a_mount_that_begins_at_the_containers_group_is_read_from_there(tmp_path: Path) -> None:
    limits = {"memoryDOTmax": "4", "inner__memoryDOTmax": "3"}
    mounts = V2.format(root="/docker/abc", top="{top}")
    assert scene(tmp_path, "0::/docker/abc/inner\n", mounts, **limits) == [3, 4]


def test_a_group_that_lies_outside_of_what_is_mounted_leaves_the_mounts_own_limit(tmp_path: Path) -> None:
    mounts = V2.format(root="/docker/abc", top="{top}")
    assert scene(tmp_path, "0::/../other\n", mounts, memoryDOTmax="4") == [4]


def test_a_machine_without_control_groups_has_no_such_limits(tmp_path: Path) -> None:
    assert host_memory.control_groups(tmp_path) == []


def test_in_version_1_a_limit_above_what_is_mounted_counts(tmp_path: Path) -> None:
    mounts = V1.format(root="/docker/abc", top="{top}")
    found = scene(tmp_path, "4:memory:/docker/abc\n", mounts, memoryDOTlimit_in_bytes="9",
                  memoryDOTstat="cache 1\nhierarchical_memory_limit 5\nhierarchical_memsw_limit 3")  # fmt: skip
    assert min(found) == 5


def test_in_version_1_files_of_groups_below_can_be_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene(tmp_path, "4:memory:/\n", V1.format(root="/", top="{top}"), memoryDOTlimit_in_bytes=str(1 << 20),
          memoryDOTusage_in_bytes=str(1 << 20), memoryDOTstat="inactive_file 1\ntotal_inactive_file 8192")  # fmt: skip
    groups = host_memory.control_groups(tmp_path / "proc")
    monkeypatch.setattr(host_memory, "control_groups", lambda: groups)
    assert host_memory.available_bytes() == 8192


def test_a_mount_is_found_whatever_its_name() -> None:
    assert host_memory._unescaped(r"/a\040b\011c\012d\134e\134040") == "/a b\tc\nd\\e\\040"


def test_other_mounts_may_have_any_name(tmp_path: Path) -> None:
    """A name may hold characters that end a line elsewhere, and bytes that are no UTF-8."""
    others = "31 23 0:27 / /mnt/a\x0cb\u2028c rw - tmpfs x rw\n32 23 0:28 / /mnt/\udcff rw - tmpfs x rw\n"
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "memory.max").write_text("5\n")
    mounts = others + V2.format(root="/", top=tmp_path / "top")
    (tmp_path / "mountinfo").write_bytes(mounts.encode(errors="surrogateescape"))
    (tmp_path / "cgroup").write_text("0::/\n")
    (group,) = host_memory.control_groups(tmp_path)
    assert host_memory._limits(group) == [5]


def test_without_proc_the_machines_memory_and_the_own_limits_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_SELF", tmp_path)
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    assert host_memory.available_bytes() == host_memory.host_bytes()


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_the_process_own_limits_count(limit: str) -> None:
    script = f"""
import resource
from quire_worker import host_memory
hard = resource.getrlimit(resource.{limit})[1]
resource.setrlimit(resource.{limit}, ({GIB}, hard))
assert host_memory.host_bytes() <= {GIB}
assert 0 < host_memory.available_bytes() < {GIB}
"""
    assert resource.getrlimit(resource.RLIMIT_AS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_worker_that_may_not_have_the_memory_that_it_needs_ends_with_a_sentence() -> None:
    script = f"""
import asyncio, sys, torch
from quire_worker.process import server
server.load = lambda *_: torch.empty(1 << 50)
server.main(["--model", {str(DEMO)!r}, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1
    assert "quire-worker: the memory that this process may have is too small: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("limit", "byte_count", "words"),
    [
        ("RLIMIT_AS", GIB, "may have 1.0 GiB of address space, and torch needs at least 1.5 GiB"),
        ("RLIMIT_DATA", GIB // 4, "may have 256.0 MiB of data, and torch needs at least 512.0 MiB"),
    ],
)
def test_a_worker_whose_limits_leave_no_room_for_torch_says_so(limit: str, byte_count: int, words: str) -> None:
    script = f"""
import os, resource, sys
resource.setrlimit(resource.{limit}, ({byte_count}, resource.getrlimit(resource.{limit})[1]))
os.execv(sys.executable, [sys.executable, "-m", "quire_worker", "--model", {str(DEMO)!r}, "--listen", "127.0.0.1:0"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert words in done.stderr
