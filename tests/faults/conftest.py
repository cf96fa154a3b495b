"""Lets tests set the wall clock of servers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest


class WallClock:
    """Sets how many seconds the wall clock is ahead, for servers that run with this `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "seconds"
        self.environment: Mapping[str, str] = {}
        self._file.write_text("0")
        if shutil.which("cc") is not None:
            library, source = folder / "wall_clock.so", Path(__file__).with_name("wall_clock.c")
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
            self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_FILE": str(self._file)}

    def require(self) -> None:
        """Skips the test if the clock cannot be set here."""
        if not self.environment:
            pytest.skip("no C compiler for the clock that servers are given")

    def jump(self, seconds: int) -> None:
        """Sets the clock this many seconds ahead, also for servers that already run."""
        self._file.write_text(str(seconds))
        if self.environment:
            command = [sys.executable, "-c", "import time; print(time.time())"]
            seen = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout
            assert abs(float(seen) - time.time() - seconds) < 60, "the clock did not jump"


@pytest.fixture(scope="session")
def wall_clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    return WallClock(tmp_path_factory.mktemp("clock"))
