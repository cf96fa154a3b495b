"""Trains the demo model of models/demo again, from text that ships with Python.

    python scripts/train_demo_model.py --output trained-demo               # the full run, under an hour on two cores
    python scripts/train_demo_model.py --output trained-demo --steps 20

Lifecycle of a run:

1. collect: the docstrings of the standard library and the texts behind Python's `help()`, in a fixed order;
2. split: every twentieth document is held out and never seen by the tokenizer or the model;
3. tokenizer: byte-level BPE of the vocabulary size that the configuration names;
4. train: AdamW with a cosine schedule over random windows of the concatenated documents;
5. save: a Hugging Face folder in the configuration's dtype, with the held-out loss printed.

The same seed, thread count, Python and torch give the same weights. Another Python has another standard library, and
so another corpus.
"""

from __future__ import annotations

import argparse
import ast
import math
import random
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DEMO_MODEL = Path(__file__).resolve().parent.parent / "models" / "demo"
END_OF_TEXT = "<|end|>"
# Packages with text that is not prose about Python, and packages that some distributions leave out.
SKIPPED_PACKAGES = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "site-packages", "dist-packages"}
)
HELD_OUT_EVERY = 20
REPORT_EVERY_STEPS = 50


@dataclass(frozen=True, slots=True)
class Recipe:
    """The hyperparameters of a run. The defaults are the values of the shipped model."""

    steps: int = 3824
    seed: int = 0
    batch_sequences: int = 16
    window_tokens: int = 256
    learning_rate_max: float = 2e-3
    warmup_steps_max: int = 100
    gradient_norm_max: float = 1.0

    def learning_rate(self, step: int) -> float:
        """Returns the rate of a zero-based step: linear warm-up over at most a tenth of the run, then a cosine to
        zero."""
        warmup_steps = min(self.warmup_steps_max, self.steps // 10)
        if step < warmup_steps:
            return self.learning_rate_max * (step + 1) / warmup_steps
        progress = (step - warmup_steps) / (self.steps - warmup_steps)
        return self.learning_rate_max * 0.5 * (1 + math.cos(math.pi * progress))


SHIPPED = Recipe()


def docstrings(source: str) -> Iterator[str]:
    """Yields every docstring of a module's source, outermost first, without importing or running the module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own sources have invalid escapes.
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def standard_library_sources() -> Iterator[Path]:
    """Yields the standard library's modules in the order of their paths, so that every run has the same corpus."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_PACKAGES.isdisjoint(path.relative_to(root).parts):
            yield path


def collect_documents() -> list[str]:
    """Returns the corpus: each distinct docstring once, then each help topic."""
    documents: dict[str, None] = {}  # A dict keeps the order in every process; a set does not.
    for path in standard_library_sources():
        documents.update(dict.fromkeys(docstrings(path.read_text(encoding="utf-8"))))
    documents.update((topics[name].strip(), None) for name in sorted(topics))
    return list(documents)


def split_documents(documents: list[str], seed: int) -> tuple[list[str], list[str]]:
    """Shuffles documents; returns the training and the held-out ones."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    training = [text for index, text in enumerate(shuffled) if index % HELD_OUT_EVERY]
    return training, shuffled[::HELD_OUT_EVERY]


def train_tokenizer(documents: list[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Trains byte-level BPE. Every byte has a token, so every text can be encoded. Token 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str], recipe: Recipe) -> torch.Tensor:
    """Returns all documents as one int64 tensor [tokens], each followed by the end token.

    Raises:
        SystemExit: the documents do not fill one window, so they are too few for training or measuring.
    """
    token_ids: list[int] = []
    for document_ids in tokenizer(documents)["input_ids"]:
        token_ids.extend(document_ids)
        token_ids.append(tokenizer.eos_token_id)
    if len(token_ids) < recipe.window_tokens:
        raise SystemExit(
            f"{len(documents)} documents have fewer than {recipe.window_tokens} tokens; use more documents"
        )
    return torch.tensor(token_ids, dtype=torch.int64)


def sample_windows(tokens: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    """Returns a random batch of int64 windows [batch_sequences, window_tokens] from tokens [tokens]."""
    starts_end = tokens.numel() - recipe.window_tokens + 1
    starts = torch.randint(starts_end, (recipe.batch_sequences, 1), generator=generator)
    return tokens[starts + torch.arange(recipe.window_tokens)]


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, tokens: torch.Tensor, recipe: Recipe) -> float:
    """Returns the mean cross entropy, in nats per token, over the whole windows in tokens [tokens]."""
    model.eval()
    window_count = tokens.numel() // recipe.window_tokens
    windows = tokens[: window_count * recipe.window_tokens].view(window_count, recipe.window_tokens)
    losses = [model(input_ids=batch, labels=batch).loss * len(batch) for batch in windows.split(recipe.batch_sequences)]
    return float(torch.stack(losses).sum()) / window_count


def train(model: LlamaForCausalLM, tokens: torch.Tensor, recipe: Recipe) -> None:
    """Runs the recipe's steps over tokens [tokens], printing the loss on the way."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate_max)
    generator = torch.Generator().manual_seed(recipe.seed)
    started_s = time.monotonic()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        windows = sample_windows(tokens, recipe, generator)
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm_max)
        optimizer.step()
        if step % REPORT_EVERY_STEPS == 0 or step == recipe.steps - 1:
            report_step(recipe, step, loss.item(), time.monotonic() - started_s)


def report_step(recipe: Recipe, step: int, loss: float, elapsed_s: float) -> None:
    steps_done = step + 1
    remaining_s = elapsed_s / steps_done * (recipe.steps - steps_done)
    tokens_per_s = steps_done * recipe.batch_sequences * recipe.window_tokens / elapsed_s
    print(
        f"step {steps_done:5d} of {recipe.steps}  loss {loss:6.3f}  {tokens_per_s:7.0f} tokens/s"
        f"  {remaining_s / 60:5.1f} min left",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model from the text that ships with Python.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not contain a model yet")
    parser.add_argument(
        "--config", type=Path, default=DEMO_MODEL, help="folder with the config.json of the model to train"
    )
    parser.add_argument("--steps", type=int, default=SHIPPED.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SHIPPED.seed, help="seed of the split, the weights and the batches")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--documents", type=int, help="use only this many documents, for a quick try")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if (arguments.output / "config.json").exists():
        parser.error(f"{arguments.output} already contains a model")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    recipe = Recipe(steps=arguments.steps, seed=arguments.seed)
    config = LlamaConfig.from_pretrained(arguments.config)
    training, held_out = split_documents(collect_documents()[: arguments.documents], recipe.seed)
    tokenizer = train_tokenizer(training, config.vocab_size)
    tokens = encode(tokenizer, training, recipe)
    held_out_tokens = encode(tokenizer, held_out, recipe)
    model = LlamaForCausalLM(config).float()  # Training is in float32, for every saved dtype.
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(training)} documents, {tokens.numel()} tokens, {parameter_count / 1e6:.1f} M parameters", flush=True)
    train(model, tokens, recipe)
    print(f"held-out loss {mean_loss(model, held_out_tokens, recipe):.3f} nats per token")
    model.to(config.dtype).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
