"""`python -m tests.fuzz.files --count N --seed S`: damaged files of models and adapters, to the worker's readers.

Each folder is a copy of a valid folder with one file changed: its bytes, one to three places of its JSON, or the header
of a safetensors file. A reader returns, or refuses with the error that it documents, within `CPU_S` seconds of
processor time and `GROWTH_BYTES` of memory. `--seed` with `--count 1` makes a folder that failed again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from quire_worker.model.adapters.peft_folder import AdapterError, read_adapter
from quire_worker.model.checkpoint import ModelError, attention_chunk_of, fingerprint
from quire_worker.model.configuration import check_configuration
from quire_worker.model.loading import load_model
from quire_worker.model.no_tokenizer import NoTokenizerError, read_tokenizer
from quire_worker.model.tokenizer import TokenizerError
from quire_worker.process.preflight import check_model
from quire_worker.requests.adapters import LIMITS

from tests.fuzz.spoiled_files import spoil

CPU_S = 10.0
WALL_S = 300.0
GROWTH_BYTES = 2 << 30
FAILURES_MAX = 10
REFUSAL_CHARACTERS_MAX = 2_000
FILES = {
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
    "weights": ("model.safetensors", "model.safetensors", "config.json"),
    "shards": ("model.safetensors.index.json",),
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
    # These are all files of a model. Reading all of them takes a second.
    "model": ("config.json", "generation_config.json", "model.safetensors"),
}
WEIGHTS = (30, 15, 10, 20, 20, 5)  # relative frequencies of the kinds in FILES


class ViolationError(AssertionError):
    """A reader broke a rule."""


@dataclass(frozen=True, slots=True)
class Right:
    """Valid folders: a checkpoint in one file, one in shards, an adapter; and the layers that the adapter may
    change."""

    whole: Path
    sharded: Path
    adapter: Path
    sites: Any


def write_right(root: Path) -> Right:
    """Writes a tiny model and an adapter of it."""
    from transformers import AutoModelForCausalLM

    from tests.worker.adapter_folders import write_adapter
    from tests.worker.tiny_models import write_tiny_llama

    whole, sharded = root / "whole", root / "sharded"
    write_tiny_llama(whole)
    model: Any = AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(sharded, max_shard_size="40KB")
    adapter = write_adapter(root / "adapter", whole, seed=1)
    return Right(whole, sharded, adapter, load_model(whole).sites)


class Readers:
    """The worker's readers of folders, by the name of their subject."""

    def __init__(self, right: Right) -> None:
        self._right = right
        self.all: dict[str, tuple[Path, Callable[[Path], object]]] = {
            "adapter": (right.adapter, self._adapter),
            "weights": (right.whole, self._weights),
            "shards": (right.sharded, self._weights),
            "configuration": (right.whole, self._configuration),
            "tokenizer": (right.whole, self._tokenizer),
            "model": (right.whole, load_model),
        }

    def _adapter(self, folder: Path) -> None:
        device = torch.device("cpu")
        adapter = read_adapter("a", folder, self._right.sites.by_name, LIMITS, device, below=folder.resolve())
        for layer, factors in adapter.factors.items():
            if not (factors.down.isfinite().all() and factors.up.isfinite().all()):
                raise ViolationError(f"an adapter with numbers that are not finite was read, at layer {layer}")

    def _weights(self, folder: Path) -> None:
        check_model(folder)
        fingerprint(folder)
        attention_chunk_of(folder)

    def _configuration(self, folder: Path) -> None:
        check_model(folder)
        check_configuration(folder, block_size=16)

    def _tokenizer(self, folder: Path) -> None:
        tokenizer = read_tokenizer(folder)
        with contextlib.suppress(TokenizerError, NoTokenizerError):
            tokenizer.decode(tokenizer.encode("A quire is a gathering of pages."))


class FuzzedFiles:
    """Changes files, and has the readers read them."""

    def __init__(self, root: Path) -> None:
        self.right = write_right(root)
        self._readers = Readers(self.right)
        self._folder = root / "spoiled"

    def run(self, seed: int, seen: Counter[str]) -> None:
        """Makes one damaged folder from a seed, and has it read.

        Raises:
            ViolationError: the reader broke a rule.
        """
        dice = random.Random(seed)
        (kind,) = dice.choices(tuple(FILES), WEIGHTS)
        source, read = self._readers.all[kind]
        name = dice.choice(FILES[kind])
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(source, self._folder)
        path = self._folder / name
        path.write_bytes(spoil(dice, name, path.read_bytes()))
        try:
            with bounded(f"{kind}, by its {name}"):
                read(self._folder)
        except (AdapterError, ModelError) as error:
            seen[f"{kind}: refused"] += 1
            if len(str(error)) > REFUSAL_CHARACTERS_MAX:
                text = f"a refusal of {len(str(error)):,} characters: {str(error)[:200]}"
                raise ViolationError(f"{kind}, by its {name}: {text}") from None
        except ViolationError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ViolationError(f"{kind}, by its {name}: {type(error).__name__}: {str(error)[:300]}") from error
        else:
            seen[f"{kind}: read"] += 1


@contextlib.contextmanager
def bounded(what: str) -> Iterator[None]:
    """Ends a block that takes too long: by an error if Python code runs, otherwise by ending the process with a
    traceback."""

    is_over = False

    def end(*_: object) -> None:
        nonlocal is_over
        # The reader may mistake the error below for an error of its library and catch it.
        is_over = True
        raise ViolationError(f"{what}: more than {CPU_S:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    faulthandler.dump_traceback_later(WALL_S, exit=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGVTALRM, before)
        if is_over:
            raise ViolationError(f"{what}: more than {CPU_S:g} s")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    if grown > GROWTH_BYTES:
        raise ViolationError(f"{what}: {grown >> 20:,} MiB of memory")


def run(count: int, seed: int) -> int:
    """Returns 1 if a rule was violated, or if a kind of folder was never read or never refused."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    torch.set_num_threads(1)
    seen, failed, first, started_s = Counter[str](), list[int](), seed, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = FuzzedFiles(Path(folder))
        # With this limit, a reader that requests all memory gets an error instead of exhausting the machine.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2 * GROWTH_BYTES,) * 2)
        while seed - first < count and len(failed) < FAILURES_MAX:
            try:
                files.run(seed, seen)
            except ViolationError as error:
                failed.append(seed)
                print(f"seed {seed}: {error}")
                if error.__cause__ is not None:
                    print("".join(traceback.format_exception(error.__cause__, limit=-6))[:4_000])
            seed += 1
    missing = {f"{kind}: {how}" for kind in FILES for how in ("read", "refused")} - set(seen)
    seconds = time.perf_counter() - started_s
    print(f"folders {seed - first:,}, {seconds:.0f} s; {json.dumps(dict(sorted(seen.items())))}")
    print(f"failed folders {len(failed)} {failed}; never seen: {sorted(missing) or 'none'}")
    return 1 if failed or (missing and count >= 1_000) else 0


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.files", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000, help="folders (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first folder (default: %(default)s)")
    options = parser.parse_args()
    return run(options.count, options.seed)


if __name__ == "__main__":
    sys.exit(main())
