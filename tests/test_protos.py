"""The generated code in the repository matches the current protos."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from google.protobuf import descriptor_pb2
from quire.errors import Reason
from quire.v1 import allocator_pb2 as pb
from quire.v1 import errors_pb2, server_pb2, worker_pb2
from quire_allocator.core.pool import Result

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "client" / "quire" / "v1"


def test_regenerating_gives_the_files_that_are_in_the_repository(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "generate_protos.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    target = tmp_path / "new"  # The script creates this folder.
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


def test_the_lowest_versions_that_the_metadata_allows_are_those_that_generated_code_needs() -> None:
    """Generated modules check the version of their runtime, and cannot be imported with an older one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors = dict(re.findall(r"^([a-z-]+)>=([0-9.]+)", "\n".join(project["dependencies"]), re.MULTILINE))
    generated = ROOT / "client" / "quire" / "v1"
    needed = {
        "grpcio": {re.search(r"GRPC_GENERATED_VERSION = '([0-9.]+)'", path.read_text())[1]
                   for path in generated.glob("*_pb2_grpc.py") if "GRPC_GENERATED_VERSION" in path.read_text()},
        "protobuf": {re.search(r"Protobuf Python Version: ([0-9.]+)", path.read_text())[1]
                     for path in generated.glob("*_pb2.py")},
    }  # fmt: skip
    assert {name: {floors[name]} for name in needed} == needed


def test_each_number_that_a_message_has_no_field_for_is_reserved() -> None:
    """Otherwise a later field could get a removed field's number, which an older peer would misread."""
    gaps = {}
    for module in (pb, server_pb2, worker_pb2):
        for message in module.DESCRIPTOR.message_types_by_name.values():
            known = descriptor_pb2.DescriptorProto()
            message.CopyToProto(known)
            taken = {field.number for field in known.field}
            taken.update(number for span in known.reserved_range for number in range(span.start, span.end))
            gaps[message.name] = sorted(set(range(1, max(taken, default=0))) - taken)
    assert {name: missing for name, missing in gaps.items() if missing} == {}


def test_results_have_the_numbers_of_the_wire() -> None:
    assert {f"RESULT_{result.name}": int(result) for result in Result} == dict(pb.Result.items())


def test_reasons_have_the_names_of_the_wire() -> None:
    on_the_wire = set(errors_pb2.Reason.keys()) - {"REASON_UNSPECIFIED"}
    assert {f"REASON_{reason.value}" for reason in Reason} == on_the_wire
