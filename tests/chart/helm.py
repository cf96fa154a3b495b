"""Helm, and the objects that it renders."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart"
TOOLS = ROOT / "build" / "chart"
KEYS = ["--set", "gateway.keysSecret=keys"]
Resource = dict[str, Any]
Render = Callable[..., list[Resource]]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLS / "layer" / "helm" / "helm", *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (each for each in resources if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def container(resource: Resource) -> Resource:
    (only,) = resource["spec"]["template"]["spec"]["containers"]
    return dict(only)
