"""Tests `quire plan`: its tables, its JSON and its errors for a `config.json`."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from quire.cli import app
from quire.planning import weight_bytes

from tests.client.servers import parsed, quire

CONFIGS = Path(__file__).parent / "configs"
GEMMA = str(CONFIGS / "gemma-3-27b.json")
# The sizing document's example: 80 layers, 64 KV heads of 64 elements.
WORKED_EXAMPLE = {
    "model_type": "qwen3",
    "torch_dtype": "float16",
    "hidden_size": 4096,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 64,
}


class Outcome(NamedTuple):
    """The result of a run of the command."""

    code: int
    out: str
    err: str


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns a function that runs the command in this process, which is much faster than in a new one."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["quire", "plan", *arguments])
        with pytest.raises(SystemExit) as raised:
            app.run()
        code = raised.value.code
        return Outcome(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


@pytest.fixture
def worked_example(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(WORKED_EXAMPLE))
    return str(tmp_path)


def test_a_plan_is_tables_that_fit_a_terminal(plan: Any) -> None:
    code, out, err = plan(GEMMA, "--memory", "80GiB", "--weights", "55GB", "--max-len", "32k")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "10 full attention" in lines[0]
    assert "groups  13; prefix hits are multiples of 16 tokens" in out
    assert "block   655,360 bytes, in 5 buffers of 131,072" in out
    rows = [line.split() for line in lines]
    assert ["2", "full", "attention", "10,", "5", "a", "page", "16", "tokens", "131,072", "0.0%"] in rows
    assert ["11", "sliding", "window", "1,024", "52,", "5", "a", "page", "16", "tokens", "131,072", "5.5%"] in rows
    # A sequence takes 2 x 2,048 blocks of full attention and 11 x 65 of the window: 4,811. The pool has 34,041 blocks,
    # enough for 7. As full attention alone, one sequence takes 32,768 x 507,904 bytes, and only 1 fits.
    assert ["32,768", "4,811", "2.9", "GiB", "0.8%", "0.8%", "15.5", "GiB", "7", "1"] in rows
    assert "weights" not in out


def test_the_worked_example_of_the_sizing_document_comes_out_right(plan: Any, worked_example: str) -> None:
    asked = ["--memory", "80000MiB", "--used", "45000MiB", "--tensor-parallel", "8", "--max-len", "172800"]
    found = json.loads(plan(worked_example, *asked, "--json").out)
    assert found["layout"]["page_bytes"] == found["layout"]["token_bytes"] * 16 == 2_621_440
    assert found["memory"]["block_count"] == 10_800
    assert found["memory"]["pool_bytes"] == 28_311_552_000
    assert found["memory"]["longest_sequence"] == 172_800
    assert found["lengths"][-1]["sequence_count"] == found["lengths"][-1]["full_attention_sequence_count"] == 1
    shown = plan(worked_example, *asked).out
    assert "1 of 8" in shown
    assert "one sequence of up to 172,800 tokens" in shown


def test_json_has_everything_in_bytes_and_tokens(plan: Any) -> None:
    found = json.loads(plan(str(CONFIGS / "qwen3-next-80b.json"), "--dtype", "fp8", "--json").out)
    assert (found["model_type"], found["dtype"], found["memory"]) == ("qwen3_next", "fp8", None)
    full, state = found["layout"]["families"]
    assert (full["kind"], full["layers"]) == ("FULL_ATTENTION", list(range(3, 48, 4)))
    assert state["group_count"] == found["layout"]["checkpoint_block_count"]
    assert found["layout"]["state_bytes"] == 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)
    assert [row["token_count"] for row in found["lengths"]] == [256, 1024, 4096, 16384, 65536, 262144]
    assert all(row["padding_share"] < 0.05 for row in found["lengths"])
    assert "sequence_count" not in found["lengths"][0]


def test_weights_are_divided_by_the_ranks_and_their_absence_is_told(plan: Any) -> None:
    llama = str(CONFIGS / "llama-3-70b.json")
    with_weights = ["--memory", "80GB", "--weights", "141GB", "--used", "1GB", "--tensor-parallel", "8", "--json"]
    found = json.loads(plan(llama, *with_weights).out)
    assert found["memory"]["used_bytes"] == 141 * 10**9 // 8 + 10**9
    assert found["notes"] == []
    without = plan(llama, "--memory", "80GB")
    assert "weights are not subtracted from the memory: give --weights or --used" in without.out


def test_weights_are_those_of_the_files_or_an_estimate(plan: Any, tmp_path: Path) -> None:
    config = {**WORKED_EXAMPLE, "vocab_size": 32_000, "intermediate_size": 28_672}
    (tmp_path / "config.json").write_text(json.dumps(config))
    estimated = json.loads(plan(str(tmp_path), "--memory", "400GiB", "--json").out)
    assert estimated["memory"]["used_bytes"] == estimated["memory"]["weight_bytes"] == weight_bytes(config)
    assert "weights are estimated at" in estimated["notes"][0]
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000))
    of_files = json.loads(plan(str(tmp_path), "--memory", "400GiB", "--tensor-parallel", "2", "--json").out)
    assert (of_files["memory"]["used_bytes"], of_files["memory"]["weight_bytes"]) == (500, 1_000)
    assert of_files["notes"] == []


def test_a_length_of_ones_own_has_a_row_and_the_blocks_can_be_pasted(plan: Any) -> None:
    out = plan(GEMMA, "--memory", "80GiB", "--weights", "55GB", "--length", "5000", "--max-len", "32k").out
    lines = [line.strip() for line in out.splitlines()]
    assert any(line.startswith("5,000 ") for line in lines)
    assert "for a worker: --blocks 34041 --dtype bfloat16" in lines
    other = plan(GEMMA, "--memory", "80GiB", "--weights", "55GB", "--block-size", "64").out
    assert "--block-size 64" in other
    for dtype, option in (("fp8", "--kv-cache-dtype fp8_e4m3"), ("float8_e5m2", "--kv-cache-dtype fp8_e5m2")):
        assert option in plan(GEMMA, "--memory", "80GiB", "--dtype", dtype).out
    names = re.split(r"\s{2,}", next(line for line in lines if line.startswith("tokens")))
    assert len(set(names)) == len(names) == 8, "no two columns have one name"


def test_lengths_beyond_what_the_model_was_made_for_are_told(plan: Any) -> None:
    out = plan(GEMMA, "--max-len", "1M", "--block-size", "64").out
    assert "1,048,576 tokens exceed the model's maximum of 131,072" in out


def test_what_a_group_is_worth_decides_between_groups_and_bytes(plan: Any) -> None:
    found = [json.loads(plan(GEMMA, "--group-cost", share, "--json").out)["layout"] for share in ("0.02", "0.005", "0")]
    assert [layout["group_count"] for layout in found] == [4, 13, 31]
    assert [round(layout["cost"]["unused"], 3) for layout in found] == [0.069, 0.028, 0.002]
    out = plan(GEMMA).out
    assert "cost    10.6%: 2.8% unused, 6.5% for groups, 1.4% for edges" in out


def test_idle_chats_are_counted_by_what_the_pool_retains(plan: Any) -> None:
    asked = [GEMMA, "--memory", "80GiB", "--used", "50GiB", "--chat-tokens", "8k", "--chat-tokens", "30000"]
    # The pool has 36,044 blocks. Each of 2 groups of full attention takes 512 blocks for a chat of 8,192 tokens, and
    # 1,875 for one of 30,000 tokens. Each of 11 window groups takes as many with dense retention. With tail retention
    # it takes 66: 64 for 1,023 tokens of the window, and 2 more.
    found = json.loads(plan(*asked, "--json").out)
    assert found["memory"]["block_count"] == 36_044
    assert [tuple(row.values()) for row in found["chats"]] == [
        (8_192, 13 * 512, 5, 2 * 512 + 11 * 66, 20),
        (30_000, 13 * 1_875, 1, 2 * 1_875 + 11 * 66, 8),
    ]
    lines = plan(*asked).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert ["8,192", "tokens", "6,656", "5", "1,750", "20"] in [line.split() for line in lines]
    without = plan(GEMMA, "--chat-tokens", "8k").out.splitlines()
    assert ["8,192", "tokens", "6,656", "1,750"] in [line.split() for line in without]


def test_heads_of_two_sizes_are_one_group_with_two_sizes_per_layer(plan: Any, tmp_path: Path) -> None:
    config = {**WORKED_EXAMPLE, "num_hidden_layers": 4, "per_layer_config": {"2": {"head_dim": 128}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = plan(str(tmp_path)).out
    assert "groups  1; prefix hits are multiples of 16 tokens" in out
    assert "524,288 / 262,144" in out


def test_a_state_is_told_in_blocks_and_in_tokens(plan: Any) -> None:
    out = plan(str(CONFIGS / "jamba-v0.1.json"), "--checkpoint-tokens", "512", "--state-dtype", "bf16").out
    # The states of 28 layers take 28 x (65,536 + 262,144) bytes. A page takes 4 layers x 64 tokens x 4,096 bytes, so a
    # token takes 16,384 bytes.
    assert "state   9,175,040 bytes in 9 blocks, as much as 576 tokens" in out
    assert "kept at the end of a prompt and every 512 tokens" in out
    assert "prefix hits are multiples of 64 tokens" in out


def test_a_model_of_states_alone_holds_sequences_of_any_length(plan: Any, tmp_path: Path) -> None:
    config = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "a sequence of any length" in plan(str(tmp_path), "--memory", "1GiB").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nonexistent"], "no file or folder /nonexistent"),
        ([str(CONFIGS)], f"no config.json in {CONFIGS}"),
        ([__file__], f"{__file__}: Extra data"),
        ([GEMMA, "--memory", "80 gallons"], "--memory: '80 gallons' is not understood: write 80GiB, 80GB or a"),
        ([GEMMA, "--memory", "80"], "--memory 80 has no unit: write 80GiB, 80GB or 80B"),
        ([GEMMA, "--max-len", "long"], "'long' is not understood: write 32k (32,768), 1M or a number of tokens"),
        ([GEMMA, "--memory", "1MiB", "--used", "1MiB"], "no block fits: 1,048,576 bytes x 0.9 - 1,048,576 used leaves"),
        ([GEMMA, "--memory", "80GiB", "--utilization", "0"], "--utilization must be above 0 and at most 1, not 0"),
        ([GEMMA, "--weights", "1GB"], "--weights and --used are subtracted from --memory: give it, too"),
        ([GEMMA, "--tensor-parallel", "3"], "'gemma3_text' cannot be divided evenly among 3 ranks"),
        *(([GEMMA, option, value], f"Invalid value for '{option}'")
          for option in ("--tensor-parallel", "--block-size", "--checkpoint-tokens") for value in ("0", str(10**20))),
        ([GEMMA, "--dtype", "fp5"], "--dtype: dtype 'fp5' is not supported; supported are float32"),
        *(([GEMMA, option, value], f"Invalid value for '{option}'")
          for option in ("--utilization", "--group-cost") for value in ("nan", "inf", "-inf", "1.5", "-1", "much")),
        *(([GEMMA, "--memory", "80GiB", option, value], f"{option}: '{value}' is not understood")
          for option in ("--length", "--max-len", "--chat-tokens", "--memory", "--weights", "--used")
          for value in ("nan", "inf", "0", "-1")),
        ([GEMMA, "--state-dtype", "fp5"], "--state-dtype: dtype 'fp5' is not supported; supported are float32"),
        ([GEMMA, "--chat-tokens", "many"], "'many' is not understood: write 32k (32,768), 1M or a number of tokens"),
        ([str(CONFIGS / "bamba-9b.json"), "--checkpoint-tokens", "65"], "a multiple of the block size of 64 tokens"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_clear_message_and_exit_code_2(plan: Any, arguments: list[str], message: str) -> None:
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_a_config_that_is_not_understood_names_its_field(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}')
    assert plan(str(path)) == (
        2,
        "",
        "quire: the configuration of model type 'llama' lacks 'num_hidden_layers' or 'n_layer' or 'n_layers'\n",
    )
    path.write_text("[]")
    assert plan(str(path)) == (2, "", f"quire: {path}: not a JSON object\n")


# -- model ids ---------------------------------------------------------------------------------------------------------


def hub(download: Callable[..., str]) -> SimpleNamespace:
    """Returns a stand-in for the huggingface_hub package whose cache is empty."""
    online = SimpleNamespace(HF_HUB_OFFLINE=False)
    return SimpleNamespace(hf_hub_download=download, try_to_load_from_cache=lambda *_: None, constants=online)


def test_a_model_id_is_fetched_where_the_hub_package_is_installed(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(**arguments: Any) -> str:
        asked.append(arguments)
        return GEMMA

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(download))
    assert "gemma3_text" in plan("google/gemma-3-27b-it").out
    wanted = {"repo_id": "google/gemma-3-27b-it", "filename": "config.json"}
    assert [{name: each[name] for name in wanted} for each in asked] == [wanted]


def test_a_model_that_is_here_is_taken_without_asking(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    shutil.copy(GEMMA, cached / "snapshots" / ("0" * 40) / "config.json")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = quire("plan", "some/model", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path))
        tries = connections_to(silent)
    assert (result.returncode, "gemma3_text" in result.stdout, tries) == (0, True, 0)


def test_a_model_id_that_is_not_here_is_asked_for_with_a_time_limit(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(**arguments: Any) -> str:
        asked.append(arguments)
        return GEMMA

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(download))
    assert "gemma3_text" in plan("google/gemma-3-27b-it").out
    assert asked[0]["etag_timeout"] == 1.5


def test_a_model_id_that_cannot_be_fetched_is_one_line(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: str) -> str:
        raise OSError("404\nand much more")

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(fail))
    message = "quire: no file or folder no/model, and Hugging Face has no config.json of a model with that id: 404\n"
    assert plan("no/model") == (2, "", message)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in plan("no/model").err


def test_a_hub_that_must_not_be_asked_is_said_to_be_so(tmp_path: Path) -> None:
    result = quire("plan", "no/model", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    nothing = "quire: no file or folder no/model, and the cache of Hugging Face has no model of that id"
    why = " (HF_HUB_OFFLINE forbids a download); give a config.json or a folder\n"
    assert (result.returncode, result.stderr) == (2, nothing + why)


def connections_to(server: socket.socket) -> int:
    """Accepts all pending connections and returns their number."""
    server.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            count += 1
    return count


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # The kernel accepts connections; no process reads them.
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = quire("plan", "no/model", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path))
        tries = connections_to(silent)
    nothing = "quire: no file or folder no/model, and Hugging Face has no config.json of a model with that id: "
    why = "Hugging Face does not answer within 1.5 s; give a config.json or a folder\n"
    assert (result.returncode, result.stderr) == (2, nothing + why)
    assert 1 <= tries <= 2, "by itself the package goes on trying, each time for as long as the command waits in all"


# -- as a process ------------------------------------------------------------------------------------------------------


def test_the_command_explains_itself_and_runs_as_a_process() -> None:
    shown = quire("plan", "--help")
    assert (shown.returncode, "Examples:" in shown.stdout) == (0, True)
    found = parsed(quire("plan", str(CONFIGS / "gpt-oss-20b.json"), "--json"))
    assert found["layout"]["group_count"] == 2


def test_other_commands_do_not_load_the_planner() -> None:
    import subprocess

    script = "import sys, quire, quire.cli.app; print([name for name in sys.modules if 'planning' in name])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
