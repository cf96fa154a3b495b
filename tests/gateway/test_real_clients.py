"""Runs common programs against the gateway. A test is skipped if its program is not installed."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from quire.local import ServerProcess

from tests.client.servers import ScriptedServer, scripted_server
from tests.e2e.stack import eventually
from tests.gateway.scene import gateway, script

WHOLE = json.dumps({"model": "scripted", "prompt": "p", "n": 2})
STREAM = json.dumps({"model": "scripted", "prompt": "p", "n": 2, "stream": True})
LONG = WHOLE + " " * (2 << 20)  # Before such a long body, curl sends `Expect: 100-continue`.
LARGE = json.dumps({"model": "scripted", "prompt": "p" * (20 << 20)})
WRONG = json.dumps({"model": "scripted"})
PATH = "/v1/completions"
JSON = {"Content-Type": "application/json"}
IN_TURN = 40  # number of consecutive requests

# Each request has an id. The program prints one line per answer: `ID STATUS ID_OF_THE_ANSWER BODY`.
JAVA = """
import java.net.URI;
import java.net.http.*;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.*;

class Ask {
    static HttpClient client;
    static String url;

    static HttpRequest of(String id, String body, boolean asks, boolean isInChunks) {
        var bytes = BodyPublishers.ofString(body);
        return HttpRequest.newBuilder(URI.create(url)).header("Content-Type", "application/json")
            .header("X-Request-Id", id).expectContinue(asks)
            .POST(isInChunks ? BodyPublishers.fromPublisher(bytes) : bytes).build();
    }

    static void say(String id, HttpResponse<String> answer) {
        System.out.println(id + " " + answer.statusCode() + " " + answer.headers().firstValue("x-request-id").get()
            + " " + answer.body().strip().replace("\\n", " "));
    }

    public static void main(String[] given) throws Exception {
        url = given[0];
        for (var version : HttpClient.Version.values()) {
            client = HttpClient.newBuilder().version(version).build();
            for (int kind = 0; kind < 2; kind++)
                for (boolean asks : new boolean[] {false, true})
                    for (boolean isInChunks : new boolean[] {false, true}) {
                        var id = version + "-" + kind + "-" + asks + "-" + isInChunks;
                        say(id, client.send(of(id, given[1 + kind], asks, isInChunks), BodyHandlers.ofString()));
                    }
            var wrong = client.send(of(version + "-wrong", given[3], false, false), BodyHandlers.ofString());
            say(version + "-wrong", wrong);
            var together = new TreeMap<String, CompletableFuture<HttpResponse<String>>>();
            for (int i = 0; i < Integer.parseInt(given[4]); i++) {
                var id = version + "-together-" + i;
                together.put(id, client.sendAsync(of(id, given[1], false, false), BodyHandlers.ofString()));
            }
            for (var each : together.entrySet()) say(each.getKey(), each.getValue().get());
        }
        System.exit(0);
    }
}
"""
NODE = """
import http from 'node:http';
const [url, whole, stream, wrong, count] = process.argv.slice(2);
const kind = {'Content-Type': 'application/json'};
const say = (id, status, got, body) => console.log(`${id} ${status} ${got} ${body.trim().replaceAll('\\n', ' ')}`);

async function fetched(id, body, more = {}) {
    const answer = await fetch(url, {method: 'POST', body, headers: {...kind, 'X-Request-Id': id}, ...more});
    say(id, answer.status, answer.headers.get('x-request-id'), await answer.text());
}
await fetched('fetch-whole', whole);
await fetched('fetch-stream', stream);
await fetched('fetch-wrong', wrong);
await fetched('fetch-in-chunks', new Blob([whole]).stream(), {duplex: 'half'});
await Promise.all([...Array(+count).keys()].map(number => fetched(`fetch-together-${number}`, whole)));

const agent = new http.Agent({keepAlive: true, maxSockets: 2});
const asked = (id, body, headers = {}, begin = request => request.end(body)) => new Promise((done, failed) => {
    const request = http.request(url, {method: 'POST', agent, headers: {...kind, 'X-Request-Id': id, ...headers}});
    request.on('error', failed);
    request.on('upgrade', () => failed(new Error('upgraded')));
    request.on('response', async answer => {
        let text = '';
        for await (const piece of answer) text += piece;
        say(id, answer.statusCode, answer.headers['x-request-id'], text);
        done();
    });
    begin(request);
});
const wait = request => { request.on('continue', () => request.end(whole)); request.flushHeaders(); };
await asked('http-expect', whole, {'Expect': '100-continue', 'Content-Length': whole.length}, wait);
await asked('http-upgrade', whole, {'Connection': 'Upgrade', 'Upgrade': 'websocket'});
await asked('http-in-pieces', whole, {}, request => { for (const sign of whole) request.write(sign); request.end(); });
const numbers = [...Array(+count).keys()];
await Promise.all(numbers.map(number => asked(`http-together-${number}`, number % 2 ? whole : stream)));
agent.destroy();
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield script(server)


@pytest.fixture(scope="module")
def served(worker: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with gateway(tmp_path_factory.mktemp("gateway"), "--worker", worker.address) as process:
        yield process


def needs(*programs: str) -> None:
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-1_000:] + done.stderr[-2_000:]
    return done.stdout


def check_lines(said: str, count: int) -> None:
    """Checks that each line is the answer to its own request."""
    lines = said.splitlines()
    assert len(lines) == count
    for line in lines:
        asked, status, answered, body = line.split(" ", 3)
        assert answered == asked
        assert status == ("400" if asked.endswith("wrong") else "200"), line
        assert is_whole(body) or (status == "400" and json.loads(body)["error"]["param"] == "prompt"), line


def is_whole(body: str) -> bool:
    """Returns whether a body is one complete answer, streamed or not."""
    if body.startswith("data: "):
        return (
            body.count("data: [DONE]") == 1 and body.strip().endswith("data: [DONE]") and body.count('"text":"x"') == 1
        )
    return [choice["text"] for choice in json.loads(body).get("choices", ())] == ["ab", "xy"]


def test_java_in_both_versions_of_http(served: ServerProcess, tmp_path: Path) -> None:
    """Java's client offers h2c with every request unless the program disables it."""
    needs("java", "javac")
    (tmp_path / "Ask.java").write_text(JAVA)
    said = run("java", tmp_path / "Ask.java", f"http://{served.address}{PATH}", WHOLE, STREAM, WRONG, IN_TURN)
    check_lines(said, 2 * (8 + 1 + IN_TURN))


def test_node_with_fetch_and_with_kept_connections(served: ServerProcess, tmp_path: Path) -> None:
    needs("node")
    (tmp_path / "ask.mjs").write_text(NODE)
    said = run("node", tmp_path / "ask.mjs", f"http://{served.address}{PATH}", WHOLE, STREAM, WRONG, IN_TURN)
    check_lines(said, 4 + IN_TURN + 3 + IN_TURN)


@contextmanager
def behind_nginx(served: ServerProcess, folder: Path, directives: str, upstream: str = "") -> Iterator[str]:
    """Yields the address of an nginx in front of the gateway."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    configuration = folder / "nginx.conf"
    configuration.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;\n"
        f" fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;\n"
        f" client_max_body_size 100m; upstream gateway {{ server {served.address}; {upstream} }}\n"
        f" server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://gateway; {directives} }} }} }}\n"
    )
    process = subprocess.Popen(["nginx", "-c", str(configuration)], stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: subprocess.run(["curl", "-s", f"127.0.0.1:{port}"], check=False).returncode == 0, "up")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


KEPT = 'proxy_http_version 1.1; proxy_set_header Connection "";'
FORWARDED = "proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade;"


@pytest.mark.parametrize("buffers", ["on", "off"])
@pytest.mark.parametrize(
    "directives", ["", KEPT, FORWARDED, FORWARDED.replace("$http_upgrade", "h2c")], ids=["1.0", "1.1", "upgrade", "h2c"]
)
def test_nginx_in_front(served: ServerProcess, tmp_path: Path, directives: str, buffers: str) -> None:
    """nginx sends HTTP/1.0 to upstreams by default. Many configurations forward upgrades, or announce an upgrade that
    the client did not ask for."""
    needs("nginx", "curl")
    both = f"{directives} proxy_buffering {buffers}; proxy_request_buffering {buffers};"
    with behind_nginx(served, tmp_path, both, "keepalive 2;" if directives == KEPT else "") as address:
        for number in range(5):
            assert is_whole(run("curl", "-sSN", "--json", WHOLE, f"{address}{PATH}"))
            assert is_whole(run("curl", "-sSN", "--json", STREAM, f"{address}{PATH}"))
            chunked = run("curl", "-sSN", "--json", WHOLE, "-H", "Transfer-Encoding: chunked", f"{address}{PATH}")
            assert is_whole(chunked), number
        assert json.loads(run("curl", "-sS", "--json", WRONG, f"{address}{PATH}"))["error"]["param"] == "prompt"
        large = tmp_path / "large"
        large.write_text(LARGE)
        assert "request_too_large" in run("curl", "-sS", "--json", f"@{large}", f"{address}{PATH}")
        assert is_whole(run("curl", "-sS", "--json", WHOLE, f"{address}{PATH}"))


@pytest.mark.parametrize("options", [[], ["-k"]], ids=["one a connection", "kept"])
@pytest.mark.parametrize("body", [WHOLE, STREAM], ids=["whole", "stream"])
def test_ab_speaks_http_1_0(served: ServerProcess, tmp_path: Path, body: str, options: list[str]) -> None:
    needs("ab")
    (tmp_path / "body").write_text(body)
    command = ["ab", "-q", "-l", "-n", IN_TURN, "-c", 4, *options, "-T", "application/json", "-p", tmp_path / "body"]
    said = run(*command, f"http://{served.address}{PATH}")
    assert re.search(rf"Complete requests: +{IN_TURN}\n", said), said
    assert re.search(r"Failed requests: +0\n", said), said
    assert "Non-2xx" not in said


@pytest.mark.parametrize(
    "options",
    [["--http1.0"], ["--http1.1"], ["--http2"], ["-H", "Expect: 100-continue"], ["-H", "Transfer-Encoding: chunked"]],
    ids=" ".join,
)
def test_curl_in_every_version(served: ServerProcess, tmp_path: Path, options: list[str]) -> None:
    needs("curl")
    url = f"http://{served.address}{PATH}"
    given, found = tmp_path / "body", [tmp_path / "first", tmp_path / "second"]
    for body in (WHOLE, STREAM, LONG, LARGE):
        given.write_text(body)
        one, two = (["-sSN", *options, "-w", "%{http_code} ", "-o", out, "--json", f"@{given}", url] for out in found)
        said = run("curl", *one, "--next", *two)
        assert said == ("413 413 " if body == LARGE else "200 200 ")
        assert all(body == LARGE or is_whole(out.read_text()) for out in found)


def test_curl_that_knows_of_http_2_is_told_that_there_is_none(served: ServerProcess) -> None:
    needs("curl")
    command = ["curl", "-sS", "--max-time", "30", "--http2-prior-knowledge", f"http://{served.address}/v1/models"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode not in (0, 28), "it is ended, and not by its own time"


def test_pythons_clients(served: ServerProcess) -> None:
    url = f"http://{served.address}{PATH}"
    for body in (WHOLE, STREAM, LONG):
        with urllib.request.urlopen(urllib.request.Request(url, body.encode(), JSON), timeout=60) as answer:
            assert is_whole(answer.read().decode())
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(url, WRONG.encode(), JSON), timeout=60)
    with raised.value as answer:
        assert answer.code == 400
    with closing(http.client.HTTPConnection(served.address, timeout=60)) as kept:
        for number in range(IN_TURN):
            parts = iter([WHOLE[:9].encode(), WHOLE[9:].encode()])
            kept.request("POST", PATH, parts if number % 2 else WHOLE, {**JSON, "X-Request-Id": str(number)})
            with kept.getresponse() as response:
                assert response.headers["x-request-id"] == str(number)
                assert is_whole(response.read().decode())
