"""Checks the dashboards' JSON against Grafana's own types, with the TypeScript compiler; needs npm and node.

    python -m scripts.dashboard_types

The check covers each dashboard, the options of its panels, and the fields of its plots. A property that a type lacks is
an error, too. The package has no type of Prometheus' queries. npm installs the packages into build/dashboard-types.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
BOARDS: Final = ROOT / "deploy" / "grafana" / "dashboards"
FOLDER: Final = ROOT / "build" / "dashboard-types"
# The types of Grafana 11.6, the version of the SDK that writes the JSON.
PACKAGES: Final = ("@grafana/schema@11.6.0", "typescript@5.9.3")
RAW: Final = "./node_modules/@grafana/schema/dist/esm/raw"  # a path, because the package does not export its folders
OPTIONS: Final = {"stat": "Stat", "timeseries": "TimeSeries", "text": "Text"}
# Properties that Grafana's types lack. The SDK writes the `auto` ones for each variable; Prometheus' annotations have
# the others.
EXTRAS: Final = {
    "templating": ("auto", "auto_min", "auto_count"),
    "annotations": ("expr", "step", "titleFormat", "textFormat"),
}
# Where Grafana's types have string enums, JSON has strings. `Plain` replaces the enums with their values.
HEAD: Final = f"""import type {{ Dashboard }} from "{RAW}/dashboard/x/dashboard_types.gen";
import type {{ Options as Stat }} from "{RAW}/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type {{
  Options as TimeSeries, FieldConfig
}} from "{RAW}/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
import type {{ Options as Text }} from "{RAW}/composable/text/panelcfg/x/TextPanelCfg_types.gen";
type Plain<T> = T extends string ? `${{T}}` : T extends object ? {{ [K in keyof T]: Plain<T[K]> }} : T;
"""


def lines_of(board: dict[str, Any]) -> Iterator[str]:
    """Yields a constant with its type for the dashboard, and for each part whose type depends on the panel."""
    name = str(board["uid"]).replace("-", "_")
    yield f"export const {name}: Plain<Dashboard> = {json.dumps(without_extras(board))};"
    for panel in board["panels"]:
        kind = OPTIONS.get(panel["type"])
        if kind is None:
            continue
        own = f"{name}_{panel['id']}"
        yield f"export const {own}_options: Plain<{kind}> = {json.dumps(panel['options'])};"
        if kind == "TimeSeries":
            fields = panel["fieldConfig"]["defaults"]["custom"]
            yield f"export const {own}_fields: Plain<FieldConfig> = {json.dumps(fields)};"


def without_extras(board: dict[str, Any]) -> dict[str, Any]:
    """Returns a dashboard without the properties in `EXTRAS`."""
    found: dict[str, Any] = json.loads(json.dumps(board))
    for part, names in EXTRAS.items():
        for each in found[part]["list"]:
            for name in names:
                each.pop(name, None)
    return found


def faults() -> str:
    """Returns the compiler's messages about the dashboards; empty if they have the right types."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    installed = FOLDER / "installed"
    if not installed.exists() or installed.read_text() != " ".join(PACKAGES):
        command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(FOLDER), *PACKAGES]
        subprocess.run(command, check=True, stdout=sys.stderr)
        installed.write_text(" ".join(PACKAGES))
    boards = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(BOARDS.glob("*.json"))]
    return faults_of(boards)


def faults_of(boards: list[dict[str, Any]]) -> str:
    """Returns the compiler's messages about these dashboards. The packages must be installed."""
    source = FOLDER / "dashboards.ts"
    source.write_text(HEAD + "\n".join(line for board in boards for line in lines_of(board)) + "\n", encoding="utf-8")
    compiler = FOLDER / "node_modules" / ".bin" / "tsc"
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler"]
    done = subprocess.run([compiler, *options, source], cwd=FOLDER, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def main() -> None:
    """Checks all dashboards, and that a wrong one would be noticed."""
    if shutil.which("npm") is None:
        print("not run: the types of the dashboards, because npm is not installed")
        return
    if found := faults():
        sys.exit(found)
    wrong = json.loads((BOARDS / "now.json").read_text(encoding="utf-8"))
    wrong["panels"][1]["options"]["colorMode"] = "rainbow"
    if "rainbow" not in faults_of([wrong]):
        sys.exit("the compiler accepts a wrong dashboard")
    print(f"the types of {len(list(BOARDS.glob('*.json')))} dashboards are Grafana's")


if __name__ == "__main__":
    main()
