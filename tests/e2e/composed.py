"""Controls a Docker Compose project for tests, from outside its containers."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Deployment:
    """A running Compose project.

    Attributes:
        environment: the environment of `docker compose`; it names the project and the ports.
        ports: published port of each long-running service, on 127.0.0.1.
    """

    environment: dict[str, str]
    ports: dict[str, int]

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        """Returns the standard output of `docker compose ARGUMENTS`. A failed command fails the test with all that it
        printed."""
        result = subprocess.run(
            ["docker", "compose", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert result.returncode == 0, f"docker compose {' '.join(arguments)}:\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def execute(self, service: str, *command: str) -> str:
        """Returns the standard output of a command in a service's container."""
        return self.compose("exec", "-T", service, *command)

    def operate(self, *arguments: str) -> str:
        """Returns the standard output of `quire` with the operator's certificate."""
        return self.compose("run", "--rm", "-T", "quire", *arguments)

    def start(self, service: str, *command: str) -> subprocess.Popen[bytes]:
        """Starts a command in a service's container in the background; its standard output is a pipe."""
        return subprocess.Popen(
            ["docker", "compose", "exec", "-T", service, *command],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
        )

    def up(self) -> None:
        """Starts the project by the same single command as a user; returns when every service is healthy."""
        self.compose("up", "--detach", "--wait", timeout_s=1500)

    def kill(self, service: str) -> None:
        """Crashes a service by SIGKILL from outside. Docker does not take the crash for a user's wish, so it restarts
        the service.

        The signal comes from a container that sees the engine's processes as the same user, so the test needs no
        privilege.
        """
        pid = str(self.inspect(service)["State"]["Pid"])
        signalling = ["docker", "run", "--rm", "--pid=host", "--network=none", "--cap-drop=ALL", "--entrypoint=python"]
        script = "import os, sys; os.kill(int(sys.argv[1]), 9)"
        subprocess.run([*signalling, "quire-allocator", "-c", script, pid], check=True, timeout=60)

    def remains(self) -> list[str]:
        """Returns the ids of the project's containers, volumes and networks."""
        label = f"label=com.docker.compose.project={self.environment['COMPOSE_PROJECT_NAME']}"
        kinds = (["container", "ls", "--all"], ["volume", "ls"], ["network", "ls"])
        commands = (["docker", *kind, "--quiet", "--filter", label] for kind in kinds)
        outputs = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands)
        return [line for output in outputs for line in output.split()]

    def inspect(self, service: str) -> dict[str, Any]:
        """Returns the engine's description of a service's only container."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        output = subprocess.run(["docker", "inspect", container], capture_output=True, check=True, timeout=30).stdout
        description: dict[str, Any] = json.loads(output)[0]
        return description

    def get_json(self, service: str, path: str) -> Any:
        """Returns the JSON that a service answers on its published port."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[service]}{path}", timeout=10) as answer:
            return json.load(answer)

    def query_all(self, expression: str) -> list[float]:
        """Returns the values of a PromQL expression, one per series."""
        path = "/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        return [float(series["value"][1]) for series in self.get_json("prometheus", path)["data"]["result"]]

    def query(self, expression: str) -> float | None:
        """Returns the value of a PromQL expression with one series; None when there is none."""
        return next(iter(self.query_all(expression)), None)


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Polls until the condition holds, because Prometheus scrapes on its own schedule and does not announce it."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.5)
