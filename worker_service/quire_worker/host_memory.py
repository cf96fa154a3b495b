"""The memory that the kernel lets this process have, read without torch.

Two things limit it. The first is the process's control group and all groups above it, of either cgroup version:
`/proc/self/cgroup` names them, and `/proc/self/mountinfo` says where they are mounted. The second is the process's own
limits of address space and data (`ulimit -v`, `-d`).
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple


class ControlGroup(NamedTuple):
    """Files of one control group: its limits, its usage, and its statistics.

    The statistics contain the page cache's part of the usage. The kernel can reclaim this part.
    """

    limits: tuple[Path, ...]
    usage: Path
    statistics: Path


_MEMINFO: Final = Path("/proc/meminfo")
_SELF: Final = Path("/proc/self")
# For each cgroup version: the controller's name in /proc/self/cgroup, the files of limits, and the file of the usage.
# The kernel slows a group above "memory.high" to a crawl, so this file counts as a limit, too.
_VERSIONS: Final = {
    "cgroup2": ("", ("memory.max", "memory.high"), "memory.current"),
    "cgroup": ("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes"),
}
_RLIMITS: Final = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
_STATM_INDEXES: Final = (0, 5)  # for each of _RLIMITS: the field of /proc/self/statm that counts its pages


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
    """Yields the folders of the process's group and of the groups above it, if they are mounted."""
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
        # The mount may begin at a group below the root. If the process's group is outside the mount, its limits cannot
        # be read.
        inner = [os.path.relpath(path, _unescaped(root)) for path in paths]
        folder = top / next((path for path in inner if not path.startswith("..")), ".")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _unescaped(text: str) -> str:
    """Decodes a path of /proc/self/mountinfo, which has space, tab, newline and backslash in octal, like `\\040`."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda found: chr(int(found[1], 8)), text)


def host_bytes() -> int:
    """Returns the most memory that this process may ever have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_rlimits(), *(limit for group in control_groups() for limit in _limits(group))])


def available_bytes() -> int:
    """Returns the bytes that this process can take now without swapping."""
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
    """Returns a group's limits. In version 1, a group's statistics include the limits of the groups above it, mounted
    or not.
    """
    found = [number for file in group.limits if (number := _number(file)) is not None]
    return [*found, *_fields(group.statistics, "hierarchical_memory_limit", 1)]


def _of_all_below(group: ControlGroup, name: str) -> list[int]:
    """Returns a statistic of a group and all groups below it. In version 1 the plain name counts only the group."""
    return _fields(group.statistics, f"total_{name}", 1) or _fields(group.statistics, name, 1)


def _rlimits() -> list[int]:
    return [soft for soft, _ in map(resource.getrlimit, _RLIMITS) if soft != resource.RLIM_INFINITY]


def size(byte_count: int) -> str:
    """Formats a byte count in the largest binary unit that it fills."""
    number, sign = float(abs(byte_count)), "-" if byte_count < 0 else ""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{sign}{number:,.0f} {unit}" if unit == "bytes" else f"{sign}{number:,.1f} {unit}"
        number /= 1024
    return f"{sign}{number:,.1f} TiB"


def _number(file: Path) -> int | None:
    """Returns the number in a file; None if the file is missing or says that there is no limit."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    """Returns the lines of a kernel file; none if the file is missing or not readable.

    Names of mounts may have any bytes, so only a newline ends a line here.
    """
    try:
        return os.fsdecode(file.read_bytes()).removesuffix("\n").split("\n")
    except OSError:
        return []


def _fields(file: Path, name: str, unit: int) -> list[int]:
    rows = [line.split() for line in _lines(file)]
    return [int(row[1]) * unit for row in rows if row[:1] == [name]]
