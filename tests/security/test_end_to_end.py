"""Tests the `quire` command against real processes that ask for certificates and a token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.local import ServerFailedError, ServerProcess

from tests.client.servers import parsed, quire
from tests.e2e.stack import DEMO
from tests.security.certificates import Certificates
from tests.security.deployment import Deployment, deployed


@pytest.fixture(scope="module")
def deployment(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    certificates.add("acme", "--observe", "default", "--namespace", "acme")
    with deployed(certificates, tmp_path_factory.mktemp("deployment")) as running:
        yield running


def environment(deployment: Deployment, who: str) -> dict[str, str]:
    """Returns the environment of a command that calls both servers as this caller."""
    tls = deployment.certificates.client(who)
    return {
        "QUIRE_ALLOCATOR": deployment.allocator.address,
        "QUIRE_WORKER": deployment.worker.address,
        "QUIRE_TOKEN_FILE": deployment.token_file,
        "QUIRE_TLS_CA": str(tls.ca),
        "QUIRE_TLS_CERT": str(tls.cert),
        "QUIRE_TLS_KEY": str(tls.key),
    }


def test_a_tenant_streams_text_and_sees_what_is_its_own(deployment: Deployment) -> None:
    acme = environment(deployment, "acme")
    mine = ["--namespace", "acme", "--max-tokens", "40", "--ignore-eos"]
    text = quire("generate", "The for statement is used to iterate", *mine, **acme)
    assert (text.returncode, len(text.stdout) > 20) == (0, True), text.stderr
    everybody = environment(deployment, "client")
    others = quire("generate", "The for statement is used to iterate", *mine[2:], "--namespace", "other", **everybody)
    assert (others.returncode, others.stdout) == (0, text.stdout), "the same text, of blocks of its own"
    assert [pool["pool"] for pool in parsed(quire("pool", "list", "--json", **acme))] == ["default"]
    for who, names in (("acme", {"acme"}), ("client", {"acme", "other"})):
        watched = quire("pool", "watch", "default", "--snapshot", "--json", **environment(deployment, who)).stdout
        assert {name for name in ("acme", "other") if f'"{name}"' in watched} == names
    assert quire("status", **acme).returncode == 0
    assert quire("health", deployment.worker.address, **acme).stdout == "server=SERVING worker=SERVING\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "The for", "--namespace", "other"], "PERMISSION_DENIED / NAMESPACE_FORBIDDEN"),
        (["generate", "The for"], "PERMISSION_DENIED / NAMESPACE_FORBIDDEN"),
        (["pool", "show", "another"], "PERMISSION_DENIED / POOL_FORBIDDEN"),
        (["pool", "watch", "another"], "PERMISSION_DENIED / POOL_FORBIDDEN"),
    ],
    ids=" ".join,
)
def test_what_a_tenant_may_not_do_is_one_line_and_exit_code_5(
    deployment: Deployment, command: list[str], message: str
) -> None:
    result = quire(*command, **environment(deployment, "acme"))
    assert (result.returncode, result.stdout) == (5, "")
    assert result.stderr.startswith(f"quire: {message}: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["QUIRE_TOKEN_FILE", "QUIRE_TLS_CERT", "QUIRE_TLS_CA"])
def test_without_one_of_its_files_the_command_is_turned_away(deployment: Deployment, missing: str) -> None:
    given = environment(deployment, "client")
    for name in (
        missing,
        *(["QUIRE_TLS_KEY"] if "TLS" in missing else []),
        *(["QUIRE_TLS_CERT"] if "CA" in missing else []),
    ):
        given[name] = ""
    result = quire("pool", "list", **given)
    assert result.returncode == (5 if missing == "QUIRE_TOKEN_FILE" else 3), result.stderr
    expected = {"QUIRE_TOKEN_FILE": "UNAUTHENTICATED / TOKEN", "QUIRE_TLS_CERT": "TLS, no client certificate"}
    assert expected.get(missing, "[not encrypted]") in result.stderr


def test_a_worker_whose_certificate_does_not_name_its_pool_says_so_and_ends(
    deployment: Deployment, tmp_path: Path
) -> None:
    tls = deployment.certificates.client("worker")
    command = ["--model", str(DEMO), "--pool", "another", "--blocks", "8", "--allocator", deployment.allocator.address]
    command += ["--allocator-ca", str(tls.ca), "--allocator-cert", str(tls.cert), "--allocator-key", str(tls.key)]
    command += ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--token-file", deployment.token_file]
    process = ServerProcess("quire_worker", command, folder=tmp_path, log=tmp_path / "log")
    with pytest.raises(ServerFailedError, match="exit code 1") as raised:
        process.wait_ready(deadline=time.monotonic() + 100)
    process.stop()
    assert "quire-worker: PERMISSION_DENIED / POOL_FORBIDDEN" in str(raised.value)
