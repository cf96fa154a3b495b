"""The chart in deploy/chart, rendered by helm and checked; it is never applied, because there is no cluster here.

Every resource must fit the strict schemas of Kubernetes, cert-manager and the Prometheus operator. The servers are also
started with the rendered arguments and certificates, and their probes are run.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import CHART, KEYS, TOOLS, Render, container, helm, named

ROOT = Path(__file__).resolve().parents[2]
# The oldest version that the chart allows, a recent version, and the newest version that has schemas.
KUBERNETES = ("1.29", "1.35", "1.37")
VARIANTS: dict[str, list[str]] = {
    "defaults": [],
    "gpu": ["-f", str(CHART / "values-gpu.yaml")],
    "tensor parallel": ["-f", str(CHART / "values-gpu.yaml"), "--set", "workers[0].gpus=4"],
    "monitoring": ["--set", "monitoring.enabled=true", "--set", "monitoring.labels.release=prometheus"],
    "many gateways": ["--set", "gateway.autoscaling.enabled=true", "--set", "gateway.replicas=2"],
    "secrets of others": [
        "--set", "certificates.certManager=false", "--set", "certificates.secrets.workers=theirs",
        "--set", "gateway.tlsSecret=http", "--set", "monitoring.enabled=true",
    ],
    "an issuer of others": [
        "--set", "certificates.issuer.name=corporate", "--set", "certificates.issuer.kind=ClusterIssuer",
    ],
    "no policies": ["--set", "networkPolicy.enabled=false", "--set", "podDisruptionBudgets=false"],
    "two models": ["-f", str(Path(__file__).with_name("two_models.yaml"))],
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_resource_fits_its_schema(render: Render, variant: str) -> None:
    import kubernetes_validate

    resources = render(*VARIANTS[variant])
    custom = [
        each for each in resources if each["apiVersion"].split("/")[0] in ("cert-manager.io", "monitoring.coreos.com")
    ]
    for each in resources:
        if each not in custom:
            for version in KUBERNETES:
                kubernetes_validate.validate(each, version, strict=True)
    done = subprocess.run(
        ["node", "validate.mjs"], cwd=TOOLS, input=json.dumps(custom), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = {each["kind"] for each in resources}
    assert {"StatefulSet", "Deployment", "Service"} <= kinds


def test_a_schema_notices_a_fault(render: Render) -> None:
    import kubernetes_validate

    (found,) = (each for each in render() if each["kind"] == "Deployment")
    found["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found, KUBERNETES[-1], strict=True)
    wrong = {"apiVersion": "cert-manager.io/v1", "kind": "Certificate", "metadata": {"name": "a"}, "spec": {}}
    done = subprocess.run(
        ["node", "validate.mjs"], cwd=TOOLS, input=json.dumps([wrong]), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Certificate a" in done.stdout


def test_lint_is_content(chart_tools: None) -> None:
    done = helm("lint", "--strict", str(CHART), *KEYS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "gateway.keysSecret: a secret with the files api-keys and metrics-token"),
        ([*KEYS, "--set", "gateway.replica=2"], "replica"),
        ([*KEYS, "--set", "workers[0].gpus=-1"], "gpus"),
        ([*KEYS, "--set", "workers[0].name=Not_A_Name"], "name"),
        ([*KEYS, "--set", "workers[0].name=gateway"], "name"),
        ([*KEYS, "-f", str(Path(__file__).with_name("one_name.yaml"))], "workers: two of them have the name small"),
        ([*KEYS, "--set", "workers=null"], "workers"),
        ([*KEYS, "--set", "workers[0].resources=null"], "resources"),
        ([*KEYS, "--set", "certificates.duration=90 days"], "duration"),
    ],
)
def test_wrong_values_are_refused_by_name(chart_tools: None, options: list[str], message: str) -> None:
    done = helm("template", "quire", str(CHART), *options)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_is_confined(render: Render, variant: str) -> None:
    for each in render(*VARIANTS[variant]):
        if each["kind"] not in ("StatefulSet", "Deployment"):
            continue
        pod, only = each["spec"]["template"]["spec"], container(each)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert only["securityContext"]["readOnlyRootFilesystem"] is True
        assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in only["resources"]["limits"]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= only.keys()
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440  # Servers refuse keys that every user can read.


def test_workers_register_names_that_their_certificate_has_and_selectors_find_their_pods(render: Render) -> None:
    resources = render(*VARIANTS["two models"])
    gateway = container(named(resources, "Deployment", "quire-gateway"))["args"]
    assert "--allocator=quire-allocator.serving.svc:7070" in gateway
    assert not [each for each in gateway if each.startswith("--worker")], "it finds them by the allocator"
    certified = named(resources, "Certificate", "quire-workers")["spec"]["dnsNames"]
    for name in ("quire-small", "quire-large"):
        workers = named(resources, "StatefulSet", name)
        (told,) = (each for each in container(workers)["args"] if each.startswith("--advertise="))
        assert told == f"--advertise=$(POD_NAME).{name}.serving.svc:7071"
        assert workers["spec"]["serviceName"] == name
        assert f"*.{name}.serving.svc" in certified
    pods = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in resources
        if each["kind"] in ("StatefulSet", "Deployment")
    ]
    for each in resources:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            assert sum(spec["selector"].items() <= pod.items() for pod in pods) == 1
        if each["kind"] == "PodDisruptionBudget":
            assert sum(spec["selector"]["matchLabels"].items() <= pod.items() for pod in pods) == 1
    large = container(named(resources, "StatefulSet", "quire-large"))
    assert large["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "--tensor-parallel=2" in large["args"]
    assert large["image"] == "registry.example/quire-worker-gpu:0.1.0"


def test_rules_and_dashboards_are_those_of_the_repository(render: Render) -> None:
    resources = render(*VARIANTS["monitoring"])
    rules = named(resources, "PrometheusRule", "quire")["spec"]
    assert rules == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"):
        data = named(resources, "ConfigMap", f"quire-dashboard-{path.stem}")["data"]
        assert data == {path.name: path.read_text()}
    for role, port in (("allocator", "metrics"), ("worker", "metrics"), ("gateway", "http")):
        spec = named(resources, "ServiceMonitor", f"quire-{role}")["spec"]
        assert [(each["port"], each["path"]) for each in spec["endpoints"]] == [(port, "/metrics"), (port, "/healthz")]
