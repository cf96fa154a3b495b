"""Stops, kills and replaces real processes."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from quire import Allocator, Client, NotFoundError, QuireError, Reason, SamplingParams, UnavailableError
from quire.local import LocalStack, ServerFailedError
from quire_allocator.metrics.collector import METRIC_NAMES as ALLOCATOR_METRICS
from quire_worker.process.worker_metrics import METRIC_NAMES as WORKER_METRICS

from tests.client.servers import quire
from tests.e2e.stack import DEMO, clients, eventually, held_block_count, server, started

GREEDY = {"max_tokens": 300, "ignore_eos": True}


def test_both_stop_cleanly_and_the_pool_is_given_back() -> None:
    stack = started()
    stack.start()
    assert stack.worker is not None
    assert stack.allocator is not None
    with Allocator(stack.allocator_address) as allocator:
        assert [pool.pool for pool in allocator.list_pools()] == ["default"]
        stack.worker.stop()
        assert stack.worker.process.returncode == 0
        assert allocator.list_pools() == ()
    stack.stop()
    assert stack.allocator.process.returncode == 0


def test_a_killed_worker_loses_its_pool_after_the_lease_and_a_new_one_takes_over(tmp_path: Path) -> None:
    with started(allocator_arguments=["--lease", "2"]) as stack, Allocator(stack.allocator_address) as allocator:
        assert stack.worker is not None
        with Client(stack.worker_address) as client:
            undisturbed = client.generate("The for", max_tokens=60, ignore_eos=True).text
            next(client.stream("The for", max_tokens=3000, ignore_eos=True))
            stack.worker.process.send_signal(signal.SIGKILL)
            stack.worker.process.wait()
        assert isinstance(stack.poll(), ServerFailedError)
        assert not allocator.get_pool("default").connected, "the lease still runs"
        arguments = ["--model", str(DEMO), "--allocator", stack.allocator_address, "--listen", "127.0.0.1:0"]
        with server("quire_worker", *arguments, folder=tmp_path / "new") as new, Client(new.address) as client:
            again = client.generate("The for", max_tokens=60, ignore_eos=True)
            assert (again.text, again.usage.cached_token_count) == (undisturbed, 0)
            eventually(lambda: held_block_count(allocator) == 0, "every block is free")
            assert allocator.get_pool("default").connected
        assert allocator.list_pools() == ()


def test_a_silent_owner_loses_its_pool(tmp_path: Path) -> None:
    with started(allocator_arguments=["--lease", "2"]) as stack, Allocator(stack.allocator_address) as allocator:
        assert stack.worker is not None
        stack.worker.process.send_signal(signal.SIGSTOP)
        eventually(lambda: allocator.list_pools() == (), "the pool is dropped")
        with pytest.raises(NotFoundError):
            allocator.get_pool("default")
        stack.worker.process.send_signal(signal.SIGCONT)
        eventually(lambda: len(allocator.list_pools()) == 1, "the worker has attached again")
        with Client(stack.worker_address) as client:
            assert client.generate("The for", max_tokens=5, ignore_eos=True).usage.output_token_count == 5


def test_text_goes_on_the_same_after_the_allocator_was_killed_and_started_again(tmp_path: Path) -> None:
    prompt = "The import statement"
    with server("quire_allocator", "--listen", "127.0.0.1:0", folder=tmp_path / "first") as first:
        arguments = ["--model", str(DEMO), "--allocator", first.address, "--listen", "127.0.0.1:0"]
        with server("quire_worker", *arguments, folder=tmp_path / "worker") as worker, Client(worker.address) as client:
            undisturbed = client.generate(prompt, **GREEDY).text
            stream = client.stream(prompt, **GREEDY)
            pieces = [next(stream).text for _ in range(3)]
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            with server("quire_allocator", "--listen", first.address, folder=tmp_path / "second"):
                pieces += [chunk.text for chunk in stream]
                assert "".join(pieces) == undisturbed
                # The text may end before the worker has attached again, so the checks below wait.
                with Allocator(first.address) as allocator:
                    eventually(lambda: len(allocator.list_pools()) == 1, "the worker has attached again")
                    eventually(lambda: held_block_count(allocator) == 0, "every block is free")
    log = (tmp_path / "worker" / "log").read_text()
    assert log.index("the allocator is away") < log.index("the session with the allocator is back")
    assert log.count("is back") == 1


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_whose_allocator_is_gone_tells_its_callers_and_stops_when_told(
    fate: signal.Signals, tmp_path: Path
) -> None:
    with started("--drain-timeout", "1", log_folder=tmp_path) as stack, Client(stack.worker_address) as client:
        assert stack.allocator is not None
        assert stack.worker is not None
        stream = client.stream("The for", max_tokens=3000, ignore_eos=True)
        next(stream)
        stack.allocator.process.send_signal(fate)
        stack.worker.process.terminate()
        with pytest.raises(UnavailableError) as caught:
            for _ in stream:
                pass
        assert caught.value.reason is Reason.DRAINING
        assert stack.worker.process.wait(15) == 0
        stack.allocator.process.send_signal(signal.SIGCONT)
    log = (tmp_path / "quire_worker.log").read_text()
    assert not [word for word in ("Traceback", "never retrieved", "exception") if word in log], log


def test_a_text_under_way_waits_for_an_allocator_that_is_away_when_its_worker_is_told_to_stop(tmp_path: Path) -> None:
    with server("quire_allocator", "--listen", "127.0.0.1:0", folder=tmp_path / "first") as first:
        arguments = ["--model", str(DEMO), "--allocator", first.address, "--listen", "127.0.0.1:0"]
        arguments += ["--drain-timeout", "30"]
        with server("quire_worker", *arguments, folder=tmp_path / "worker") as worker, Client(worker.address) as client:
            stream = client.stream("The for", max_tokens=2000, ignore_eos=True)
            count = len(next(stream).token_ids)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            worker.process.terminate()
            eventually(lambda: "draining" in (tmp_path / "worker" / "log").read_text(), "it was told to stop")
            with server("quire_allocator", "--listen", first.address, folder=tmp_path / "second"):
                assert count + sum(len(chunk.token_ids) for chunk in stream) == 2000
                assert worker.process.wait(15) == 0


def test_a_text_under_way_is_finished_when_its_worker_is_told_to_stop_within_the_time_for_it(tmp_path: Path) -> None:
    with server("quire_allocator", "--listen", "127.0.0.1:0", folder=tmp_path / "allocator") as allocator:
        for drain_s, is_finished in (("30", True), ("0.1", False)):
            arguments = ["--model", str(DEMO), "--allocator", allocator.address, "--listen", "127.0.0.1:0"]
            with (
                server("quire_worker", *arguments, "--drain-timeout", drain_s, folder=tmp_path / drain_s) as worker,
                Client(worker.address) as client,
            ):
                stream = client.stream("The for", max_tokens=2000, ignore_eos=True)
                count = len(next(stream).token_ids)
                worker.process.terminate()
                if is_finished:
                    assert count + sum(len(chunk.token_ids) for chunk in stream) == 2000
                else:
                    with pytest.raises(UnavailableError) as caught:
                        list(stream)
                    assert caught.value.reason is Reason.DRAINING
                assert worker.process.wait(15) == 0


def test_what_a_folder_lacks_is_said_in_one_line_before_its_weights_are_read(tmp_path: Path) -> None:
    # The folder has no weights. The worker has no tokenizer either, but a tokenizer is optional.
    shutil.copy(DEMO / "config.json", tmp_path)
    with (
        pytest.raises(ServerFailedError) as raised,
        server("quire_worker", "--model", str(tmp_path), folder=tmp_path / "w"),
    ):
        pass
    said = str(raised.value).splitlines()
    assert "exit code 2" in said[0]
    assert said[-1].startswith("quire-worker: neither model.safetensors nor model.safetensors.index.json in ")
    assert "Traceback" not in str(raised.value)


def test_a_layer_of_an_unknown_kind_is_refused_by_name_before_anything_else_is_read(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    kinds = ["full_attention"] * (config["num_hidden_layers"] - 1) + ["retention"]
    (model / "config.json").write_text(json.dumps({**config, "layer_types": kinds}))
    with (
        pytest.raises(ServerFailedError) as raised,
        server("quire_worker", "--model", str(model), folder=tmp_path / "w"),
    ):
        pass
    said = str(raised.value).splitlines()
    assert said[-1].startswith("quire-worker: model type 'llama' cannot be served: 'layer_types' of model type")
    assert said[-1].endswith("'retention' is unknown")


def test_a_model_without_a_tokenizer_is_served_to_callers_who_give_token_ids(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DEMO / name, tmp_path)
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    with LocalStack(DEMO) as stack, Client(stack.worker_address) as client:
        prompt = client.tokenize("The for statement")
        expected = client.generate(prompt, greedy).samples[0].token_ids
    with LocalStack(tmp_path) as stack, Client(stack.worker_address) as client:
        generation = client.generate(prompt, greedy, echo=True)
        assert (generation.samples[0].token_ids, generation.text) == (expected, "")
        for refused in (
            lambda: client.generate("The for statement"),
            lambda: client.generate(prompt, stop=["x"]),
            lambda: client.generate(prompt, regex="x*"),
            lambda: client.tokenize([{"role": "user", "content": "x"}]),
            lambda: client.detokenize(prompt),
        ):
            with pytest.raises(QuireError, match="comes without a tokenizer: give token ids") as caught:
                refused()
            assert caught.value.reason is Reason.NOT_SUPPORTED


def test_a_folder_that_is_not_there_is_said_to_be_none(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with (
        pytest.raises(ServerFailedError) as raised,
        server("quire_worker", "--model", str(nowhere), folder=tmp_path / "w"),
    ):
        pass
    assert str(raised.value).splitlines()[-1] == f"quire-worker: there is no folder {nowhere}"


def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with server("quire_allocator", "--listen", "127.0.0.1:0", folder=tmp_path / "first") as first:
        for option in ("--listen", "--metrics"):
            with (
                pytest.raises(ServerFailedError) as raised,
                server("quire_allocator", "--listen", "127.0.0.1:0", option, first.address, folder=tmp_path / option),
            ):
                pass
            assert f"quire-allocator: cannot {'listen' if option == '--listen' else 'serve metrics'} on" in str(
                raised.value
            )
            assert "Traceback" not in str(raised.value)


def test_without_an_allocator_health_says_so_and_new_requests_are_refused() -> None:
    with started() as stack, Client(stack.worker_address, timeout_s=5) as client:
        assert stack.allocator is not None
        assert client.health()
        stack.allocator.process.kill()
        eventually(lambda: not client.health(), "the worker says that it does not serve")
        assert quire("health", stack.worker_address).returncode == 1
        live = quire("health", "--live", stack.worker_address)
        assert (live.returncode, live.stdout) == (0, "server=SERVING\n"), "a probe for life must not kill what goes on"
        assert stack.worker is not None
        metrics = f"http://{stack.worker.metrics_address}"
        assert [quire("health", *more, metrics).returncode for more in ([], ["--live"])] == [1, 0]
        with pytest.raises(UnavailableError) as caught:
            client.generate("The for", max_tokens=2)
        assert caught.value.reason is Reason.ALLOCATOR_LOST


def scraped(address: str) -> dict[str, float]:
    """Returns the samples, summed by name over all labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    totals: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def test_metrics_of_both_count_what_happened() -> None:
    with started("--blocks", "64") as stack, clients(stack) as (client, allocator):
        prompt = "The with statement is used to wrap the execution of a block" * 3
        first = client.generate(prompt, max_tokens=10, n=2, temperature=0.5, seed=1, ignore_eos=True).usage
        second = client.generate(prompt, max_tokens=10, ignore_eos=True).usage
        eventually(lambda: held_block_count(allocator) == 0, "every block is free")
        assert stack.worker is not None
        assert stack.allocator is not None
        worker, blocks = scraped(stack.worker.metrics_address), scraped(stack.allocator.metrics_address)
    histograms = {
        "quire_worker_step_seconds",
        "quire_worker_queue_seconds",
        "quire_worker_time_to_first_token_seconds",
        "quire_worker_inter_token_seconds",
        "quire_worker_request_seconds",
        "quire_worker_batch_samples",
        "quire_allocator_step_seconds",
        "quire_allocator_recovery_seconds",
        "quire_allocator_block_lifetime_seconds",
        "quire_allocator_block_idle_seconds",
        "quire_allocator_block_reuse_gap_seconds",
    }
    assert WORKER_METRICS - histograms <= worker.keys()
    assert ALLOCATOR_METRICS - histograms <= blocks.keys()
    assert worker["quire_worker_tokens_total"] == sum(
        usage.prompt_token_count + usage.cached_token_count + usage.output_token_count for usage in (first, second)
    )
    assert worker["quire_worker_requests_total"] == 2
    assert worker["quire_worker_time_to_first_token_seconds_count"] == 2
    assert blocks["quire_allocator_blocks"] == worker["quire_worker_blocks"] == 64
    block_bytes = worker["quire_worker_kv_bytes"] / 64
    assert blocks["quire_allocator_group_bytes"] == blocks["quire_allocator_group_blocks"] * block_bytes > 0
    assert blocks["quire_allocator_granted_blocks_total"] == first.granted_block_count + second.granted_block_count
    assert blocks["quire_allocator_steps_total"] == blocks["quire_allocator_step_seconds_count"] > 3
