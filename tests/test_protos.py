"""The generated code in the repository is what the protos say today."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "client" / "quire" / "v1"


def test_regenerating_gives_the_files_that_are_in_the_repository(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "generate_protos.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    target = tmp_path / "new"  # the script makes the folder
    done = subprocess.run(
        ["bash", str(script), "--to", str(target)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    generated = {path.name: path.read_text() for path in (target / "quire" / "v1").iterdir()}
    committed = {
        path.name: path.read_text()
        for path in COMMITTED.iterdir()
        if path.suffix in {".py", ".pyi"} and path.name != "__init__.py"
    }
    assert sorted(generated) == sorted(committed)
    stale = [name for name, text in generated.items() if committed[name] != text]
    assert not stale, "run make proto"


def test_every_proto_has_generated_code() -> None:
    for path in (ROOT / "protos" / "quire" / "v1").glob("*.proto"):
        assert (COMMITTED / f"{path.stem}_pb2.py").exists()
