"""Draws dashboards of a deployment under load with Grafana's own front-end packages, in Chromium.

    python scripts/draw_dashboards.py FOLDER [--seconds 120]

It needs prometheus, chromium and npm, which installs 436 MB into build/drawing. The deployment is that of
`make dashboards-check`, so the pictures show two tenants, a dead gateway and an allocator that was killed.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.observed import Scene, observed  # noqa: E402

SOURCES = ROOT / "scripts" / "drawing"
BUILT = ROOT / "build" / "drawing"
WIDTH = 1400
HEIGHTS = {"now": 1030, "tenants": 1490, "cache": 875, "requests": 3850, "recovery": 1830, "fleet": 1840}
PAGE = """<!doctype html><link rel="stylesheet" href="main.css"><div id="root"></div>
<script type="module" src="main.js"></script>"""
ESBUILD = (
    "--bundle --format=esm --minify --jsx=automatic --log-level=error --loader:.svg=dataurl --loader:.png=dataurl "
    "--loader:.ttf=dataurl --loader:.woff=dataurl --loader:.woff2=dataurl --define:global=globalThis "
    "--define:process.env.VSCODE_TEXTMATE_DEBUG=\"false\" --alias:react-router-dom-v5-compat=./router.js"
)  # fmt: skip


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging each request."""

    def log_message(self, *arguments: object) -> None:
        """Does nothing instead of writing to standard error."""


def build() -> Path:
    """Builds the page that draws; returns its folder. npm installs its packages once."""
    BUILT.mkdir(parents=True, exist_ok=True)
    for path in SOURCES.iterdir():
        shutil.copy(path, BUILT)
    if not (BUILT / "node_modules").exists():
        subprocess.run(["npm", "install", "--legacy-peer-deps", "--no-audit", "--no-fund"], cwd=BUILT, check=True)
    command = ["node_modules/.bin/esbuild", "main.jsx", "--outfile=www/main.js", *ESBUILD.split()]
    subprocess.run([*command, '--define:process.env.NODE_ENV="production"'], cwd=BUILT, check=True)
    for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"):
        shutil.copy(path, BUILT / "www")
    (BUILT / "www" / "index.html").write_text(PAGE)
    return BUILT / "www"


def draw(scene: Scene, port: int, folder: Path) -> None:
    """Draws each dashboard in its current state."""
    end = int(time.time())
    for name, height in HEIGHTS.items():
        values = {"dash": f"{name}.json", "end": end, "secs": int(end - scene.started_s)}
        address = f"http://127.0.0.1:{port}/?" + urllib.parse.urlencode(
            {**values, "prom": f"http://{scene.prometheus}"}
        )
        with tempfile.TemporaryDirectory() as profile:
            options = [f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}", "--virtual-time-budget=20000"]
            options += ["--no-sandbox"] if os.geteuid() == 0 else []
            command = ["chromium", "--headless=new", "--disable-gpu", "--hide-scrollbars", *options]
            picture = folder / f"{name}.png"
            done = subprocess.run(
                [*command, f"--screenshot={picture}", address], capture_output=True, timeout=120, check=False
            )
        if done.returncode or not picture.exists():
            sys.exit(f"{name} could not be drawn:\n{done.stderr.decode()}")


def main() -> None:
    """Builds the page, runs the deployment, and draws it."""
    parser = argparse.ArgumentParser(description="Draw the dashboards of a deployment under load.")
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    parser.add_argument("--seconds", type=float, default=120, help="seconds of load before the pictures")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    www = build()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(www)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder, observed(Path(folder)) as scene:
        ends_s = time.monotonic() + options.seconds
        while time.monotonic() < ends_s:
            scene.load()
        draw(scene, server.server_port, options.folder)


if __name__ == "__main__":
    main()
