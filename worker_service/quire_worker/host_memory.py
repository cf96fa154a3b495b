"""This machine's memory, as much of it as its control group allows; known without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple


class ControlGroup(NamedTuple):
    """Files of one version of control groups: what may be taken, what is, and how much of that is files' content that
    the kernel gives back."""

    limit: Path
    usage: Path
    statistics: Path


CONTROL_GROUPS: Final = tuple(
    ControlGroup(folder / limit, folder / usage, folder / "memory.stat")
    for folder, limit, usage in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
)
_MEMINFO: Final = Path("/proc/meminfo")


def host_bytes() -> int:
    """Returns all memory that this process may ever have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(number for group in CONTROL_GROUPS if (number := _number(group.limit)) is not None)])


def available_bytes() -> int:
    """Returns what can be taken now without pushing anything else out."""
    left = [host_bytes(), *_fields(_MEMINFO, "MemAvailable:", 1 << 10)]
    for group in CONTROL_GROUPS:
        limit, usage = _number(group.limit), _number(group.usage)
        if limit is not None and usage is not None:
            left.append(limit - usage + sum(_fields(group.statistics, "inactive_file", 1)))
    return max(min(left), 0)


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
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _fields(file: Path, name: str, unit: int) -> list[int]:
    rows = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
    return [int(row[1]) * unit for row in rows if row[0] == name]
