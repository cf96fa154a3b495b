"""The demo model's training script, run for three steps on a small corpus."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from scripts import train_demo_model  # noqa: E402 - it imports torch

SCRIPT = Path(train_demo_model.__file__)


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    result = run_script("--output", str(folder), "--steps", "3", "--threads", "1", "--documents", "400")
    assert result.returncode == 0, result.stderr
    assert "held-out loss" in result.stdout
    return folder


def test_a_trained_folder_loads_and_generates(trained: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    prompt = tokenizer("Return the", return_tensors="pt").input_ids
    output = model.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert output.shape == (1, prompt.shape[1] + 5)
    assert model.dtype == torch.bfloat16
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0


def test_a_trained_folder_has_the_shipped_models_configuration(trained: Path) -> None:
    shipped = train_demo_model.DEMO_MODEL / "config.json"
    written = transformers.LlamaConfig.from_pretrained(trained)
    assert written.to_diff_dict() == transformers.LlamaConfig.from_pretrained(shipped.parent).to_diff_dict()


def test_the_trained_tokenizer_round_trips_any_text(trained: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    for text in ("def f(x): return x", "naïve café ☕", "\ttabs\n\nand\x00bytes"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_an_output_folder_that_holds_a_model_is_refused(trained: Path) -> None:
    result = run_script("--output", str(trained), "--steps", "1")
    assert result.returncode == 2
    assert "already contains a model" in result.stderr


def test_the_corpus_is_collected_in_the_same_order_every_time() -> None:
    source = '"""Module."""\nclass A:\n    """Outer."""\n    def f(self):\n        """Inner."""\n'
    assert list(train_demo_model.docstrings(source)) == ["Module.", "Outer.", "Inner."]
    paths = list(train_demo_model.standard_library_sources())
    assert paths == sorted(paths)
    assert not any("test" in path.parts for path in paths)


def test_held_out_documents_are_never_trained_on() -> None:
    documents = [f"document {index}" for index in range(101)]
    training, held_out = train_demo_model.split_documents(documents, seed=7)
    assert sorted(training + held_out) == sorted(documents)
    assert len(held_out) == 6
    assert train_demo_model.split_documents(documents, seed=7) == (training, held_out)
    assert train_demo_model.split_documents(documents, seed=8) != (training, held_out)


def test_the_learning_rate_warms_up_and_falls_to_almost_nothing() -> None:
    recipe = train_demo_model.Recipe(steps=1000)
    rates = [recipe.learning_rate(step) for step in range(recipe.steps)]
    assert rates.index(max(rates)) in (99, 100)
    assert max(rates) == recipe.learning_rate_max
    assert 0 < rates[-1] < 1e-8
    assert train_demo_model.Recipe(steps=2).learning_rate(0) == recipe.learning_rate_max
