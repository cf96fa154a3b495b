"""The examples of the README and of the engine page work as printed."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quire import Allocator, AsyncAllocator, Client, PoolSpec
from quire.hashing import prompt_digests, root_digest
from quire.local import LocalStack, ServerProcess
from quire.mirror import PrefixMirror
from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session import AsyncSession

from tests.allocator.service.one_by_one import calls
from tests.e2e.stack import server, started

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with started() as running:
        yield running


def python_of(document: str) -> list[str]:
    """Returns the Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


def printed(stack: LocalStack, *command: str) -> str:
    """Returns the output of a command that finds the stack at the default addresses."""
    addresses = {"QUIRE_WORKER": stack.worker_address, "QUIRE_ALLOCATOR": stack.allocator_address}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **addresses},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example_runs_and_prints_what_it_says(stack: LocalStack) -> None:
    (example,) = python_of("README.md")
    assert len(example.splitlines()) <= 14
    out = printed(stack, "-c", example)
    counts = re.search(r"(\d+) blocks instead of (\d+)\n\d+ blocks stay cached", out)
    assert counts is not None, out
    assert 2 * int(counts[1]) < int(counts[2]), "it shows what sharing saves"


# The document leaves the KV pages and the model to its reader. Here KV pages are lists, and the model hashes the
# contents of pages.
ENGINE = """
import asyncio, hashlib
prompt_tokens = list(range(40))
pages = [[-1] * 16 for _ in range(4096)]

def next_token(tokens, seed=0):
    return hashlib.blake2b(repr((tokens, seed)).encode()).digest()[0]

def copy_block(source, destination):
    pages[destination] = list(pages[source])

def forward(tokens, due, table):
    for position in due:
        block, place = divmod(position, 16)
        pages[table[0][block]][place] = tokens[position]
    content = [token for block in table[0] for token in pages[block]][: len(tokens)]
    assert content == list(tokens), "the pages hold the text"
    count[0] += 1
    return next_token(content)

def sample_again():
    return next_token(text.tokens[:-1], 1)

def is_end(token):
    if len(text.tokens) == 100:
        ends.append(list(text.tokens))
    return len(text.tokens) == 100

count, ends, forked = [0], [], []
"""


def test_the_engine_is_built_step_by_step_from_the_snippets_of_its_page(stack: LocalStack) -> None:
    """Each snippet continues the previous one. The fork snippet runs once, after the first token."""
    specification, admitted, turns, fork = python_of("docs/engine.md")
    once = "if not forked:\n    forked.append(1)\n" + textwrap.indent(textwrap.dedent(fork), "    ")
    (append,) = re.findall(r"^ +text\.append\(token\).*\n", turns, re.MULTILINE)
    body = admitted + textwrap.indent(turns.replace(append, append + textwrap.indent(once, " " * 8)), "    ")
    main = "async def main():\n    global text\n" + textwrap.indent(body, "    ")
    script = ENGINE + specification + main + "\nasyncio.run(main())\nprint(count[0], len(ends))\n"
    script += "first, second = ends\nassert first[:40] == second[:40] and first[40] != second[40]\n"
    script += "assert all(e[i] == next_token(e[:i]) for e in ends for i in range(41, 100))\n"
    assert printed(stack, "-c", script).splitlines() == ["0 tokens were in the pages already", "119 2"]


def test_what_the_text_of_the_readme_names_is_there_and_does_that(stack: LocalStack, tmp_path: Path) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    spans = set(re.findall(r"`([^`]+)`", text))
    paths = {span for span in spans if (ROOT / span).exists()}
    words = {"fork", "extend", "generate", "score", "best_of", "cli", "allocator", "worker", "gateway", "transformers"}
    by_make = {span for span in spans if re.search(r"(^|=\.\.\. )make [a-z-]+$", span)}
    under_vllm = "vllm serve MODEL --scheduler-cls quire_vllm.QuireScheduler"  # `make test-vllm` runs this command.
    elsewhere = {".venv", ". .venv/bin/activate", "--device cuda", under_vllm}  # `--device cuda` needs a GPU.
    here: dict[str, Callable[[], object]] = {
        "pip install .": lambda: installed(tmp_path / "installed"),
        "pip install '.[all]'": extras,
        "client.prefill(document)": lambda: branches(stack),
        "engine(...)": lambda: engine(stack),
        "session(...)": lambda: asyncio.run(session(stack)),
        'session(..., transport="calls")': lambda: unary(stack),
        'watch_events("default")': lambda: watched(stack),
        "quire.mirror.PrefixMirror": lambda: watched(stack),
        "import quire_kernels": lambda: printed(stack, "-c", "import quire_kernels"),
        "--cpu 3": lambda: pinned(tmp_path),
        "quire request list": lambda: printed(stack, "-m", "quire.cli", "request", "list"),
        "--random 900": lambda: printed(stack, "benchmarks/hybrid.py", "--random", "2", "--sides", "quire", "--json"),
        "--otlp-endpoint": lambda: printed(stack, "-m", "quire.cli", "worker", "--help").index("--otlp-endpoint"),
        "--tensor-parallel 2": lambda: printed(stack, "-m", "quire.cli", "worker", "--help").index("--tensor-parallel"),
    }
    assert spans - paths - words - by_make - elsewhere == here.keys(), "each is run, or it is none of ours to run"
    for run in here.values():
        run()


def installed(folder: Path) -> None:
    """Installs the client alone, without the packages of its extras."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "."], cwd=ROOT, check=True, timeout=60)
    assert (folder / "quire" / "_async" / "client.py").exists()


def extras() -> None:
    """Checks the extras that the README lists, and that `all` contains all of them."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (of_all,) = named["all"]
    brought = set(re.findall(r"\[(.*)\]", of_all)[0].split(","))
    assert {"cli", "allocator", "worker", "gateway"} <= brought < named.keys()


def branches(stack: LocalStack) -> None:
    with Client(stack.worker_address) as client:
        branch = client.prefill("The for statement iterates over the items of a sequence.")
        (other,) = branch.fork(1)
        other.extend(" The while")
        assert other.generate(max_tokens=4).text
        assert len(branch.score([" yes", " no"])) == 2
        branch.release()
        other.release()


SPEC = PoolSpec.full_attention(block_count=64, block_size=16, model_fingerprint=b"readme")


def engine(stack: LocalStack) -> None:
    with Allocator(stack.allocator_address) as client, client.engine("readme/engine", SPEC) as running:
        assert running.admit(list(range(20))).table[0]


async def session(stack: LocalStack) -> None:
    client = AsyncAllocator(stack.allocator_address)
    async with client, client.session("readme/session", SPEC) as running:
        assert running.connected


def unary(stack: LocalStack) -> None:
    client = Allocator(stack.allocator_address)
    with client, calls(client, "readme/calls", SPEC) as running:
        assert running.session_id


def watched(stack: LocalStack) -> None:
    with Client(stack.worker_address) as worker, Allocator(stack.allocator_address) as client:
        status, prompt = worker.status(), list(range(1, 41))
        worker.generate(prompt, max_tokens=1)
        mirror = PrefixMirror(client.get_pool("default").spec)
        root = root_digest(fingerprint=status.model_fingerprint, layout=status.cache_layout)
        for event in client.watch_events("default"):
            mirror.apply(event)
            if mirror.matched_token_count(prompt_digests(root, prompt, status.block_size), "") == 32:
                break


def pinned(folder: Path) -> None:
    """Starts a pinned allocator, on a CPU that this machine has: it may have no CPU 3."""
    cpu = str(max(os.sched_getaffinity(0)))
    with server("quire_allocator", "--listen", "127.0.0.1:0", "--cpu", cpu, folder=folder / "pinned") as allocator:
        assert os.sched_getaffinity(allocator.process.pid) <= os.sched_getaffinity(0)


def commands() -> list[str]:
    """Returns each line of the README's shell blocks, without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]


def first_hour() -> list[str]:
    """Returns each command of the first-hour page, which shows the output of the README's commands and some more."""
    page = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
    return [line.strip() for line in page.splitlines() if line.startswith("    ")]


def test_the_page_of_the_first_hour_says_what_each_line_prints() -> None:
    assert {*commands(), "make up", "make down", "pip install .", "quire-allocator --cpu 3"} <= set(first_hour())


@pytest.mark.timeout(600)  # The test runs every command of the page, one after another.
def test_every_line_of_the_shell_is_run_here_or_by_a_target_that_there_is(tmp_path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # Two lines run elsewhere: `sys.executable` replaces the activation, and `make test-compose` runs the compose line.
    elsewhere = {". .venv/bin/activate", 'docker compose exec worker quire generate "The for statement"'}
    # A test above runs two of these three commands.
    elsewhere |= {"git clone ... quire && cd quire", "pip install .", "quire-allocator --cpu 3"}
    by_make = [line for line in first_hour() if line.startswith("make ")]
    assert {line.split()[1] for line in by_make} <= targets
    here = [line for line in first_hour() if line not in (*by_make, *elsewhere)]
    up, *others = here
    assert up == "quire up --model models/demo"
    free = [f"--listen-{name}=127.0.0.1:0" for name in ("allocator", "worker", "gateway")]
    free += [f"--metrics-{name}=127.0.0.1:0" for name in ("allocator", "worker")]
    arguments = [*up.split()[1:], *free]
    with subprocess.Popen(
        [sys.executable, "-m", "quire.cli", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as stack:
        assert stack.stderr is not None
        try:
            said = ""
            while not said.endswith("Ctrl-C stops all.\n"):
                line = stack.stderr.readline()
                assert line, said  # An empty line means that `quire up` has ended.
                said += line
            allocator, worker = (
                re.findall(rf"{name} serves on (\S+?);?[\s]", said)[0] for name in ("allocator", "worker")
            )
            gateway = re.findall(r"curl http://(\S+?)/v1", said)[0]
            environment = {**os.environ, "QUIRE_ALLOCATOR": allocator, "QUIRE_WORKER": worker, "COLUMNS": "120"}
            for line in others:
                words = shlex.split(line.replace("127.0.0.1:8000", gateway).replace("127.0.0.1:7070", allocator))
                if words[0] == "quire":
                    words = [sys.executable, "-m", "quire.cli", *words[1:]]
                where = tmp_path if "certs" in words else ROOT
                with subprocess.Popen(words, cwd=where, env=environment, stdout=-1, stderr=-1, text=True) as process:
                    assert process.stdout is not None
                    first = ""
                    if "watch" in words:  # `watch` runs forever.
                        first = process.stdout.readline()
                        process.send_signal(signal.SIGINT)
                    out, error = process.communicate(timeout=60)
                    out = first + out
                assert out or "certs" in words, (line, error)
                assert process.returncode in ((0, 130) if "watch" in words else (0,)), (line, error)
        finally:
            stack.send_signal(signal.SIGINT)
            stack.wait(60)


def test_the_demo_runs_and_prints_what_sharing_saved() -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py", "--max-tokens", "24"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"│ (\d prompts?, \d \w+) +│ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │", done.stdout)
    assert [row[0] for row in rows] == ["4 prompts, 1 prefix", "1 prompt, 4 samples"]
    for _, tokens, _, prompt, cached, used, separate in rows:
        assert int(tokens) == 96
        assert 0 < int(cached) < int(prompt)
        assert 0 < int(used) < int(separate)
    assert "0 blocks held" in done.stdout
    assert "it writes gibberish" in done.stdout.replace("\n", " ")
    samples = re.search(r"1 prompt, 4 samples +(#+)\++ +\d+ of \d+ tokens", done.stdout)
    assert samples is not None, "its prefix is in the cache, from the first part"
    drawn = re.findall(r"^ *(?:The|A) \w+ \w+ ((?: +=?\d+)+) *$", done.stdout, re.MULTILINE)
    assert len(drawn) == 4
    shared = [re.findall(r"=(\d+)", row) for row in drawn]
    assert shared[0]
    assert all(row == shared[0] for row in shared)
    own = [set(re.findall(r" (\d+)", row)) for row in drawn]
    assert all(own)
    assert len(set.union(*own)) == sum(map(len, own))


def allocator_process(folder: Path) -> ServerProcess:
    """Starts an allocator on the same socket as the previous one."""
    arguments = ["--listen", f"unix://{folder}/socket", "--metrics", "127.0.0.1:0"]
    allocator = ServerProcess("quire_allocator", arguments, folder=folder, log=folder / "log")
    allocator.wait_ready(deadline=time.monotonic() + 30)
    return allocator


def test_an_engine_of_ones_own_decodes_on_while_its_allocator_is_dead(tmp_path: Path) -> None:
    allocator = allocator_process(tmp_path)
    command = [sys.executable, "examples/own_engine.py"]
    environment = {**os.environ, "QUIRE_ALLOCATOR": f"unix://{tmp_path}/socket"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        first = [engine.stdout.readline() for _ in range(4)]
        assert "".join(first).count("32 of 41 tokens were in the pages") == 3
        allocator.process.kill()
        allocator.stop()
        successor = allocator_process(tmp_path)
        last, _ = engine.communicate(timeout=100)
        successor.stop()
    assert engine.returncode == 0
    alone = re.search(r"(\d+) tokens were computed without an allocator; (\d+) allocators were told of them", last)
    assert alone is not None
    assert int(alone[1]) > 0
    assert int(alone[2]) == 2
    assert "all 5 texts are those that are computed without pages" in last


async def test_an_engine_of_ones_own_is_right_when_every_answer_is_there_before_it_computes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    submit = AsyncSession.submit

    async def answered(session: AsyncSession, step: StepBuilder) -> asyncio.Future[StepOutcome]:
        answer = await submit(session, step)
        await asyncio.wait([answer])
        return answer

    monkeypatch.setattr(AsyncSession, "submit", answered)
    monkeypatch.setenv("QUIRE_ALLOCATOR", f"unix://{tmp_path}/socket")
    allocator = await asyncio.to_thread(allocator_process, tmp_path)
    await runpy.run_path(str(ROOT / "examples" / "own_engine.py"))["main"]()
    allocator.stop()
    assert "all 5 texts are those that are computed without pages" in capsys.readouterr().out
