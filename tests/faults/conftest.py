"""A wall clock that tests may set, in servers that are told of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest


class WallClock:
    """Seconds that servers with this `environment` think the wall clock is ahead."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "seconds"
        self.jump(0)
        library = folder / "wall_clock.so"
        source = Path(__file__).with_name("wall_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "WALL_CLOCK_FILE": str(self._file)}

    def jump(self, seconds: int) -> None:
        """Sets it, also for servers that run."""
        self._file.write_text(str(seconds))


@pytest.fixture(scope="session")
def wall_clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for the clock that servers are given")
    return WallClock(tmp_path_factory.mktemp("clock"))
