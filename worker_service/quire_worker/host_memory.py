"""This machine's memory, as much of it as the kernel lets this process have; known without torch.

It is limited by the process's control group and all groups above it, of either version (`/proc/self/cgroup` names them,
`/proc/self/mountinfo` says where they are), and by its own limits of address space and data (`ulimit -v`, `-d`).
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple


class ControlGroup(NamedTuple):
    """Files of one control group: what may be taken, what is, and how much of that is files' content that the kernel
    gives back."""

    limits: tuple[Path, ...]
    usage: Path
    statistics: Path


_MEMINFO: Final = Path("/proc/meminfo")
_SELF: Final = Path("/proc/self")
# For each version: what its line in /proc/self/cgroup names, and its files. Beyond "high" a group is slowed to a crawl.
_VERSIONS: Final = {
    "cgroup2": ("", ("memory.max", "memory.high"), "memory.current"),
    "cgroup": ("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes"),
}
_RLIMITS: Final = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
_STATM_INDEXES: Final = (0, 5)  # of the pages that each of them limits, in /proc/self/statm


def control_groups(proc: Path = _SELF) -> list[ControlGroup]:
    """Returns the memory's control groups that this process is in, the innermost of each version first.

    Args:
        proc: the process's folder in /proc.
    """
    found = []
    for kind, (name, limits, usage) in _VERSIONS.items():
        for folder in _folders(proc, kind, name):
            files = tuple(folder / limit for limit in limits)
            found.append(ControlGroup(files, folder / usage, folder / "memory.stat"))
    return found


def _folders(proc: Path, kind: str, controller: str) -> Iterator[Path]:
    """Yields the folders of the process's group and of those above it, as far as they are mounted."""
    paths = [
        path
        for _, controllers, path in (line.split(":", 2) for line in _lines(proc / "cgroup"))
        if controller in controllers.split(",")
    ]
    for line in _lines(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        type_, _, options = after.split(" ", 2)
        if type_ != kind or (controller and controller not in options.split(",")):
            continue
        top = Path(_unescaped(mount))
        # What is mounted may begin at a group below the root; where the group lies elsewhere, its limits are unseen.
        inner = [os.path.relpath(path, _unescaped(root)) for path in paths]
        folder = top / next((path for path in inner if not path.startswith("..")), ".")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _unescaped(text: str) -> str:
    """Returns a path that /proc/self/mountinfo writes: with space, tab, newline and backslash in octal, as `\\040`."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda found: chr(int(found[1], 8)), text)


def host_bytes() -> int:
    """Returns all memory that this process may ever have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_rlimits(), *(limit for group in control_groups() for limit in _limits(group))])


def available_bytes() -> int:
    """Returns what can be taken now without pushing anything else out."""
    left = [host_bytes(), *_fields(_MEMINFO, "MemAvailable:", 1 << 10)]
    for group in control_groups():
        usage = _number(group.usage)
        if usage is not None:
            given_back = (_of_all_below(group, "inactive_file") or [0])[0]
            left += [limit - usage + given_back for limit in _limits(group)]
    statm = [int(number) for line in _lines(_SELF / "statm") for number in line.split()]
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    for limit, index in zip(_RLIMITS, _STATM_INDEXES, strict=True):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            left.append(soft - (statm[index] if statm else 0) * page_bytes)
    return max(min(left), 0)


def _limits(group: ControlGroup) -> list[int]:
    """Returns the limits that hold for a group. In version 1 its statistics know those above it, mounted or not."""
    found = [number for file in group.limits if (number := _number(file)) is not None]
    return [*found, *_fields(group.statistics, "hierarchical_memory_limit", 1)]


def _of_all_below(group: ControlGroup, name: str) -> list[int]:
    """Returns a statistic of a group and all below it. Version 1 counts the group alone under the plain name."""
    return _fields(group.statistics, f"total_{name}", 1) or _fields(group.statistics, name, 1)


def _rlimits() -> list[int]:
    return [soft for soft, _ in map(resource.getrlimit, _RLIMITS) if soft != resource.RLIM_INFINITY]


def size(byte_count: int) -> str:
    """Writes bytes in the largest binary unit that they fill."""
    number, sign = float(abs(byte_count)), "-" if byte_count < 0 else ""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{sign}{number:,.0f} {unit}" if unit == "bytes" else f"{sign}{number:,.1f} {unit}"
        number /= 1024
    return f"{sign}{number:,.1f} TiB"


def _number(file: Path) -> int | None:
    """Returns what a file says; None where there is none, or it says that there is no limit."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    """Returns the lines of a file of the kernel's; none where there is no such file, or it is not for us to read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _fields(file: Path, name: str, unit: int) -> list[int]:
    rows = [line.split() for line in _lines(file)]
    return [int(row[1]) * unit for row in rows if row[:1] == [name]]
