#!/usr/bin/env bash
# Generates client/quire/v1 from protos/; --to DIR writes elsewhere. Needs the `dev` extra; PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=client
[ "${1:-}" = --to ] && out=$2
mkdir -p "$out"
bin=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
messages=(--python_out="$out" --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" --mypy_out=quiet:"$out")
"$python" -m grpc_tools.protoc -Iprotos "${messages[@]}" --grpc_python_out="$out" \
  --plugin=protoc-gen-mypy_grpc="$bin/protoc-gen-mypy_grpc" --mypy_grpc_out=quiet:"$out" \
  protos/quire/v1/*.proto
# These two protos have no service, so their stubs are empty and would only mislead.
rm -f "$out"/quire/v1/{errors,server}_pb2_grpc.{py,pyi}

# Generates the private twin of a step's messages, which has bytes in place of columns.
descriptors=$(mktemp)
trap 'rm -f "$descriptors"' EXIT
"$python" -m grpc_tools.protoc -Iprotos --include_imports --descriptor_set_out="$descriptors" protos/quire/v1/allocator.proto
"$python" scripts/packed_twin.py "$descriptors"
"$python" -m grpc_tools.protoc --descriptor_set_in="$descriptors" "${messages[@]}" quire/v1/_packed.proto
