#!/bin/sh
# Makes build/peers/vllm-manager, an environment that can import vLLM's KVCacheManager, Quire, and all packages of
# $PYTHON's environment. benchmarks/allocator.py and benchmarks/hybrid.py run in it. A separate environment keeps vLLM out
# of the one in which Quire is developed. The new environment takes 1 GB. It has only the dependencies of vLLM that
# these imports need, so no model runs in it.
set -eu

PYTHON=${PYTHON:-.venv/bin/python}
FOLDER=${FOLDER:-build/peers/vllm-manager}

"$PYTHON" -m venv --without-pip "$FOLDER"
SITE=$("$FOLDER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Python reads a path file at its start. By this file, the new environment imports everything that $PYTHON can import.
"$PYTHON" -c 'import sys; print(*[path for path in sys.path[1:] if not path.startswith(sys.base_prefix)], sep="\n")' \
    > "$SITE/quire.pth"
install() {
    "$PYTHON" -m pip --python "$FOLDER/bin/python" install --quiet --disable-pip-version-check -c constraints.txt "$@"
}
install --no-deps vllm==0.33.0 xgrammar llguidance
install aiohttp apache-tvm-ffi cachetools cbor2 cloudpickle fastapi msgspec openai openai-harmony opentelemetry-api \
    partial-json-parser pillow psutil py-cpuinfo pybase64 pyzmq requests
"$FOLDER/bin/python" -c 'from vllm.v1.core.kv_cache_manager import KVCacheManager'
