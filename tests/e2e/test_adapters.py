"""Loads adapters as users do, by worker options, `quire adapter` and the client, and kills the allocator during the
requests.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from quire import Client
from quire.errors import QuireError, Reason

from tests.client.servers import parsed, quire
from tests.e2e.stack import server
from tests.worker.adapter_folders import adapted_text, write_adapter
from tests.worker.engine_harness import prompt, reference_text
from tests.worker.tiny_models import write_tiny_llama

TOKENS = prompt(40, seed=4)
GREEDY: Any = {"max_tokens": 200}


def test_adapters_are_loaded_chosen_and_dropped_while_the_allocator_is_killed(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "llama")
    folders = {name: write_adapter(tmp_path / "adapters" / name, base, seed=seed) for seed, name in enumerate("ab")}
    expected = {name: adapted_text(base, folder, tuple(TOKENS), 200) for name, folder in folders.items()}
    expected[""] = reference_text(base, tuple(TOKENS), 200)
    with server("quire_allocator", "--listen", "127.0.0.1:0", folder=tmp_path / "first") as first:
        own = ["--model", str(base), "--allocator", first.address, "--listen", "127.0.0.1:0"]
        adapters = ["--adapter", f"a={folders['a']}", "--adapter-folder", str(tmp_path / "adapters")]
        with (
            server("quire_worker", *own, *adapters, folder=tmp_path / "worker") as worker,
            Client(worker.address) as client,
        ):
            to_worker = ["--worker", worker.address]
            assert parsed(quire("adapter", "load", "b", "b", "--json", *to_worker))["rank"] == 4
            assert [each.name for each in client.list_adapters()] == ["a", "b"]
            assert {each["layer_count"] for each in parsed(quire("adapter", "list", "--json", *to_worker))} == {14}
            with ThreadPoolExecutor(3) as threads:
                names = sorted(expected)
                texts = list(threads.map(lambda name: client.generate(TOKENS, adapter=name, **GREEDY), names))
                assert [text.samples[0].token_ids for text in texts] == [expected[name] for name in names]
                streams = [client.stream(TOKENS, adapter=name, **GREEDY) for name in names]
                pieces = [next(stream).token_ids for stream in streams]
                first.process.send_signal(signal.SIGKILL)
                first.process.wait()
                with server("quire_allocator", "--listen", first.address, folder=tmp_path / "second"):
                    for name, piece, stream in zip(names, pieces, streams, strict=True):
                        assert piece + sum((chunk.token_ids for chunk in stream), ()) == expected[name]
                    assert quire("adapter", "unload", "b", *to_worker).returncode == 0
                    with pytest.raises(QuireError) as caught:
                        client.generate(TOKENS, adapter="b", **GREEDY)
                    assert caught.value.reason is Reason.ADAPTER_UNKNOWN
                    assert "no adapter named 'b'" in quire("generate", "x", "--adapter", "b", *to_worker).stderr
                    assert quire("adapter", "load", "c", "../llama", *to_worker).returncode != 0
