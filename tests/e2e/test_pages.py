"""The commands and the code of the documents run as printed: those that `tests/page_blocks.py` gives to this file.

The blocks of a page run in order, in one folder, beside an allocator and a worker with the demo model. Three things
differ from the print: free ports for fixed ones, this machine's name for the names of other machines, and `WORDS`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import pytest
from quire import Client
from quire.local import LocalStack

from tests.e2e.stack import eventually, started
from tests.page_blocks import HERE, HOW, ROOT, Block, blocks_of, pages
from tests.worker.adapter_folders import write_adapter

PAGES: Final = [page for page in pages() if any(HOW[block.key] == HERE for block in blocks_of(page) if block.key)]
SERVERS: Final = {"allocator": "7070", "worker": "7071", "gateway": "8000"}
HOSTS: Final = (
    r"(?<![\w.])(allocator\.internal|worker-1\.internal|localhost|allocator|127\.0\.0\.1|0\.0\.0\.0|a|b):(\d{4})\b"
)
START_S: Final = 100.0

# Page -> placeholders in the page's commands, each with this test's value.
WORDS: Final[dict[str, dict[str, str]]] = {
    "docs/models.md": {"NAME=FOLDER ...": "first=adapter --model models/demo --adapter-folder .", "FOLDER": "adapter"},
    "docs/gateway.md": {"b:7071": "127.0.0.1:7072"},
    "docs/operating.md": {"FOLDER": "models/demo"},
    "docs/security.md": {"allocator.internal": "localhost", "worker-1.internal": "localhost"},
    "docs/speculation.md": {"MODEL": "models/demo", "SMALLER": "models/demo"},
}
# Page -> code that runs before the page's code, and code that checks the result.
AROUND: Final[dict[str, tuple[str, str]]] = {
    "docs/beams.md": (
        "from quire import Client\nclient = Client()",
        "assert found.samples[0].score >= found.samples[1].score and len(found.samples) == 2",
    ),
    "docs/branches.md": (
        "document = 'The for statement iterates over the items of a sequence. ' * 8",
        "assert len(scores) == 2 and left.token_count > root.token_count",
    ),
    "docs/hybrid.md": (
        """
import hashlib
from quire import Allocator, GroupKind, GroupSpec, PoolSpec
from quire.protocol.steps import StepBuilder

def digests_of(end):
    names = ["0", "1", "2", "3", f"4{end}", f"5{end}"]
    return b"".join(hashlib.sha256(name.encode()).digest() for name in names)

groups = (GroupSpec(GroupKind.FULL_ATTENTION, 16), GroupSpec(GroupKind.STATE, 64))
allocator = Allocator()
session = allocator.session("hybrid", PoolSpec(64, groups, "layout", b"page"), transport="calls")
session.open()
former, digests = digests_of("a"), digests_of("b")
session.step(StepBuilder().allocate(1, 96, former))
session.step(StepBuilder().commit(1, 96, former).free(1))
""",
        "assert (answer.matched_token_count, answer.attended_token_count, answer.stops[:2]) == (0, 64, (64, 80))\n"
        "session.close(), allocator.close()",
    ),
    "docs/sampling.md": ("from quire import Client\nclient = Client()", ""),
    "docs/session.md": (
        "from quire import Allocator, PoolSpec\nfrom quire.protocol.steps import StepBuilder\n"
        "spec, digests = PoolSpec.full_attention(block_count=64, block_size=16, model_fingerprint=b'page'), bytes(128)",
        "assert len(outcome.grows[0].blocks[0]) == 4",
    ),
}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with started() as running:
        yield running


class Reader:
    """Somebody who pastes the blocks of one page, in one folder.

    Attributes:
        ports: the printed port of each server, and the port that it has here.
    """

    def __init__(self, page: str, folder: Path, stack: LocalStack, ending: ExitStack) -> None:
        self.page, self.folder, self._ending = page, folder, ending
        self.ports = {port: address.rpartition(":")[2] for port, address in _addresses(stack).items()}
        for name in ("models", "benchmarks", "Makefile", "scripts"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "bin").mkdir()
        for name in ("quire", "quire-allocator", "quire-worker", "quire-gateway"):
            (folder / "bin" / name).symlink_to(Path(sys.executable).parent / name)
        (folder / "bin" / "python").symlink_to(sys.executable)
        self._servers = 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables of each command, with the addresses of the servers that answer now."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        at = {f"QUIRE_{name.upper()}": f"127.0.0.1:{self.ports[SERVERS[name]]}" for name in ("allocator", "worker")}
        return {**os.environ, **at, "PATH": path, "COLUMNS": "120", "OMP_WAIT_POLICY": "PASSIVE"}

    def here(self, text: str) -> str:
        """Returns a printed text with this machine's ports and words."""
        for printed, word in WORDS.get(self.page, {}).items():
            text = text.replace(printed, word)
        return re.sub(HOSTS, lambda found: f"{_host(found[1])}:{self.ports.get(found[2], found[2])}", text)

    def paste(self, block: Block) -> None:
        """Runs a block; fails where a command fails."""
        if block.language == "python":
            before, after = AROUND.get(self.page, ("", ""))
            self.run([sys.executable, "-c", self.here(f"{before}\n{block.text}\n{after}\n")], block.text)
            return
        for line in block.text.replace("\\\n", " ").splitlines():
            self._command(line.partition(" #")[0].strip())

    def _command(self, line: str) -> None:
        words = shlex.split(line)
        match words:
            case ["make", *targets]:
                self.run(["make", "-n", "-C", str(ROOT), *targets], line)
            case ["pip", "install", what]:
                _knows_extras(what)
            case ["quire", server, *arguments] if server in SERVERS:
                self._serve(server, shlex.split(self.here(shlex.join(arguments))))
            case [program, *arguments] if program.removeprefix("quire-") in SERVERS:
                self._serve(program.removeprefix("quire-"), shlex.split(self.here(shlex.join(arguments))))
            case _:
                self.run(["bash", "-euc", self.here(line)], line)

    def run(self, command: list[str], printed: str = "") -> None:
        """Runs a command; fails where it fails."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=110, check=False
        )
        assert done.returncode == 0, (printed, done.stdout[-1_000:], done.stderr[-2_000:])

    def _serve(self, name: str, arguments: list[str]) -> None:
        """Starts a server of the page on free ports, and waits until it serves. Later lines find it at its port."""
        self._servers += 1
        ready = self.folder / f"ready-{self._servers}.json"
        options = ["--listen", "--metrics"] if name != "gateway" else ["--listen"]
        for option in options:
            if option not in arguments:
                arguments += [option, "127.0.0.1:0"]
        if name == "worker" and "--pool" not in arguments:
            arguments += ["--pool", f"page-{self._servers}"]  # The stack's worker has the pool `default`.
        for option in options:
            place = arguments.index(option) + 1
            arguments[place] = re.sub(r"\d+$", "0", arguments[place])
        log = self.folder / f"server-{self._servers}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["quire", name, *arguments, "--ready-file", str(ready)],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
            )
        self._ending.callback(_stop, process)
        deadline = time.monotonic() + START_S
        while not ready.exists():
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
            assert process.returncode is None, (arguments, log.read_text()[-2_000:])
            assert time.monotonic() < deadline, (arguments, log.read_text()[-2_000:])
        at = json.loads(ready.read_text())
        self.ports[SERVERS[name]] = at["address"].rpartition(":")[2]

    def serve_second_worker(self) -> None:
        """Starts a worker with a pool of its own, printed as `b:7071`. The first worker keeps its port."""
        first = self.ports["7071"]
        self._serve("worker", ["--model", "models/demo", "--pool", "b"])
        self.ports["7072"], self.ports["7071"] = self.ports["7071"], first

    def ask_for_long(self, request_id: str) -> None:
        """Begins a request that runs until it is canceled or the page ends, and waits until it runs."""
        address = f"127.0.0.1:{self.ports['7071']}"
        code = "import sys, quire\nwith quire.Client(sys.argv[1]) as client:\n    client.generate("
        # A single text would reach the end of the model's context within seconds, so the request has 64 texts.
        code += "'The for statement', n=64, temperature=1.0, max_tokens=4_000, ignore_eos=True, "
        code += "request_id=sys.argv[2], timeout_s=300)"
        asking = subprocess.Popen(
            [sys.executable, "-c", code, address, request_id], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._ending.callback(asking.wait, 60)
        self._ending.callback(asking.kill)
        with Client(address) as client:
            eventually(lambda: bool(client.requests(request_id)), "the request is there", within_s=60)


def _addresses(stack: LocalStack) -> dict[str, str]:
    return {"7070": stack.allocator_address, "7071": stack.worker_address}


def _host(printed: str) -> str:
    """Returns the host of this machine for a printed one. Addresses to listen on stay as they are."""
    return printed if printed == "localhost" or printed[0].isdigit() else "127.0.0.1"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def _knows_extras(what: str) -> None:
    """Checks that a distribution has the extras. `make release` installs the distribution with each extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.fullmatch(r"\.(?:\[(.*)\])?", what)
    assert named is not None, what
    assert set((named[1] or "cli").split(",")) <= extras.keys()


def prepare(block: Block, reader: Reader) -> None:
    """Makes the files and the calls that the commands of a block speak of."""
    match block.page, block.first.split()[:2]:
        case "docs/gateway.md", ["pip", _]:
            reader.serve_second_worker()
            reader.run(["quire", "certs", ".", "--host", "localhost"])
        case "docs/models.md", _:
            write_adapter(reader.folder / "adapter", ROOT / "models" / "demo", seed=1)
        case "docs/operating.md", ["quire", "top"]:
            reader.ask_for_long("ID")
        case "docs/operating.md", ["quire", "bench"]:
            lines = [json.dumps({"prompt": f"The {word} statement"}) for word in ("for", "while", "if")]
            (reader.folder / "prompts.jsonl").write_text("\n".join(lines))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, stack: LocalStack, tmp_path: Path) -> None:
    name = str(page.relative_to(ROOT))
    with ExitStack() as ending:
        reader = Reader(name, tmp_path, stack, ending)
        for block in blocks_of(page):
            if HOW[block.key or ""] == HERE:
                prepare(block, reader)
                reader.paste(block)
