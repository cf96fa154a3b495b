"""The command line of the worker."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from quire._serving import request_log
from quire._serving.command_line import Parser
from quire._serving.server import add_arguments
from quire.session.lookahead import AHEAD_TOKENS

from quire_worker.kv_options import KV_CACHE_DTYPES, KV_LAYOUTS, UTILIZATION
from quire_worker.model.checkpoint import attention_chunk_of
from quire_worker.process.kv_event_options import add_kv_events
from quire_worker.process.option_values import memory_bytes, model_name, named_folder
from quire_worker.process.pool_policy import add_policy
from quire_worker.process.registration import add_registration
from quire_worker.scheduling.output import STREAM_INTERVAL_S
from quire_worker.speculation.lookup import NGRAM_MAX as PROMPT_LOOKUP_MAX
from quire_worker.speculation.lookup import TOKEN_COUNT_MAX as SPECULATIVE_TOKENS_MAX

BLOCK_SIZE = 16  # default, in tokens
BLOCKS_PER_STEP_MAX = 8_192  # most blocks that one forward pass may fill, so that their digests fit into a step
STREAM_INTERVAL_MS_MAX = 1_000
CUDA_GRAPH_BATCH_MAX = 256  # 35 graphs; see `execution.decode_graphs.ladder`
# Defaults by device. A GPU computes hundreds of tokens in the time that reading the weights takes. So one pass may take
# a whole prompt of 4 k tokens, and reads the weights once.
ON_CPU = {"max_batch_tokens": 512, "max_running": 64}
ON_GPU = {"max_batch_tokens": 4_096, "max_running": 256}
MODEL_NAMES_MAX = 16
RUNNING_MAX = 4_096  # most running samples; each may need a few operations of one step
# vLLM's names of the same options, for users who know vLLM. `--help` does not show these names.
VLLM_NAMES = {
    "max_running": ("--max-num-seqs",),
    "max_batch_tokens": ("--max-num-batched-tokens",),
    "max_waiting": ("--max-num-queued-reqs",),
    "max_cuda_graph_batch": ("--max-cudagraph-capture-size",),
    "tensor_parallel": ("-tp", "--tensor-parallel-size"),
}
DTYPE_NICKNAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
COUNT_MAX = 2**31 - 1
THREADS_MAX = 1_024
_COUNTS = {  # lower and upper bound of each option
    "block_size": (1, COUNT_MAX),
    "blocks": (1, COUNT_MAX),
    "max_batch_tokens": (1, COUNT_MAX),
    "max_running": (1, RUNNING_MAX),
    "max_waiting": (1, COUNT_MAX),
    "threads": (1, THREADS_MAX),
    "tensor_parallel": (1, COUNT_MAX),
    "max_adapters": (1, COUNT_MAX),
    "max_adapter_rank": (1, COUNT_MAX),
    "grant_ahead_tokens": (0, COUNT_MAX),
    "max_cuda_graph_batch": (0, COUNT_MAX),
    "watermark_blocks": (0, COUNT_MAX),
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line of the worker."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    for name, size in (ON_CPU if options.device == "cpu" else ON_GPU).items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    if options.block_size is None:
        options.block_size = math.gcd(BLOCK_SIZE, attention_chunk_of(Path(options.model)))
    _check(parser, options)
    _check_model(parser, options)
    _check_speculation(parser, options)
    return options


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="quire-worker", description="Generate text with one model, in blocks that an allocator grants."
    )
    _add_model(parser)
    parser.add_argument("--pool", default="default", help="name of this worker's pool (default: %(default)s)")
    parser.add_argument(
        "--allocator",
        default=os.environ.get("QUIRE_ALLOCATOR", "127.0.0.1:7070"),
        help="address of the allocator (default: $QUIRE_ALLOCATOR or 127.0.0.1:7070)",
    )
    _add_tls(parser)
    add_arguments(parser, listen="127.0.0.1:7071", metrics="127.0.0.1:9471")
    request_log.add_argument(parser)
    parser.add_argument(
        "--vllm-metrics",
        action="store_true",
        help="also serve the metrics under vLLM's names, such as vllm:kv_cache_usage_perc",
    )
    _add_pool(parser)
    add_policy(parser)
    for option, text in (
        ("--max-batch-tokens", "tokens per forward pass"),
        ("--max-running", "samples that run at the same time"),
    ):
        name = option[2:].replace("-", "_")
        default = " and ".join(f"{sizes[name]} on a {place}" for place, sizes in (("CPU", ON_CPU), ("GPU", ON_GPU)))
        parser.add_argument(option, type=int, help=f"{text} (default: {default})")
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=1024,
        help="most waiting requests of one namespace; twice as many of all namespaces (default: %(default)s)",
    )
    parser.add_argument(
        "--grant-ahead-tokens",
        type=int,
        default=AHEAD_TOKENS,
        help="tokens that each sample has room for beyond the next one, if blocks are free; it can decode this many "
        "while the allocator is away; 0: none (default: %(default)s)",
    )
    parser.add_argument(
        "--stream-interval-ms",
        type=float,
        default=STREAM_INTERVAL_S * 1e3,
        help="minimum time between two messages of a stream, except the first and the last; faster tokens share a "
        "message; 0: every token is a message (default: %(default)g)",
    )
    _add_conversations(parser)
    _add_formats(parser)
    parser.add_argument(
        "--max-cuda-graph-batch",
        type=int,
        default=CUDA_GRAPH_BATCH_MAX,
        help="on a GPU, the largest batch of decoding samples with a CUDA graph; graphs of smaller batches are "
        "captured, too; 0: no graphs (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of the model, per rank (default: %(default)s)"
    )
    for add in (_add_speculation, _add_adapters, _add_ranks, add_kv_events, add_registration):
        add(parser)
    parser.add_renamed("--cuda-graph-batch-max", "--max-cuda-graph-batch")
    for name, theirs in VLLM_NAMES.items():
        parser.add_argument(*theirs, dest=name, type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the model, its names and its longest sequence."""
    parser.add_argument(
        "--model",
        required=True,
        help="folder with config.json, safetensors and tokenizer.json; without a tokenizer, prompts are token ids",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        type=model_name,
        metavar="NAME",
        help=f"names that requests may use for the model, up to {MODEL_NAMES_MAX}; answers name the first one "
        "(default: the folder's name)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="most tokens of a prompt and its answer together, at most the model's context; the pool must hold one "
        "such sequence (default: the model's context, or what the pool holds)",
    )


def _add_conversations(parser: argparse.ArgumentParser) -> None:
    """Adds the options for conversations."""
    parser.add_argument(
        "--special-tokens-in-chats",
        choices=("text", "tokens"),
        default="text",
        help="how to read a special token in a message, such as <|im_end|>: as ordinary text, or as the token, which "
        "lets its writer forge messages (default: %(default)s; in the chat template they are always tokens)",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template of conversations (default: the checkpoint's)",
    )
    parser.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let a request bring its own chat template, which runs in the same sandbox as the checkpoint's",
    )


def _add_pool(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the size and the number of blocks."""
    parser.add_argument(
        "--block-size",
        type=int,
        help=f"tokens per block (default: {BLOCK_SIZE}, or a part of it that divides the model's attention chunks)",
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument(
        "--kv-memory",
        type=memory_bytes,
        help="memory for the pool, such as 2GiB, or a share of the machine's or the GPU's memory, such as 80%%. "
        "Default on a CPU: half of the memory that is available after loading the model, but at most what "
        "--max-running whole contexts need (at least 256MiB). Default on a GPU: what --gpu-memory-utilization "
        "leaves after model and passes, as measured",
    )
    memory.add_argument("--blocks", type=int, help="blocks of the pool, instead of --kv-memory")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=UTILIZATION,
        help="share of a GPU's memory that may be in use, pool included (default: %(default)s)",
    )


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses numbers that are out of range, alone or together."""
    for name, (least, most) in _COUNTS.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            parser.error(f"--{name.replace('_', '-')} must be {bound}, not {value}")
    if not 0 <= options.stream_interval_ms <= STREAM_INTERVAL_MS_MAX:
        given = options.stream_interval_ms
        parser.error(f"--stream-interval-ms must be from 0 to {STREAM_INTERVAL_MS_MAX}, not {given}")
    if not 0 < options.gpu_memory_utilization <= 1:
        parser.error(f"--gpu-memory-utilization must be above 0 and at most 1, not {options.gpu_memory_utilization:g}")
    if options.max_batch_tokens > BLOCKS_PER_STEP_MAX * options.block_size:
        most = BLOCKS_PER_STEP_MAX * options.block_size
        parser.error(
            f"--max-batch-tokens must be at most {most:,}, {BLOCKS_PER_STEP_MAX:,} blocks of {options.block_size}, not"
            f" {options.max_batch_tokens:,}"
        )
    if not options.rank_timeout >= 1:
        parser.error(f"--rank-timeout must be at least 1 second, not {options.rank_timeout:g}")
    for name in ("adapter_memory", "swap_memory"):
        if isinstance(getattr(options, name), Fraction):
            parser.error(f"--{name.replace('_', '-')} must be a size, such as 2GiB, not a share")


def _check_model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses invalid names of the model, and sequences that are too short for an answer."""
    names = options.served_model_name or ()
    if len(names) > MODEL_NAMES_MAX or len(set(names)) < len(names):
        parser.error(f"--served-model-name must have at most {MODEL_NAMES_MAX} different names, not {len(names)}")
    for name, _ in options.adapter:
        if name in names:
            parser.error(f"--adapter {name}: the model itself has that name (--served-model-name)")
    if options.max_model_len is not None and options.max_model_len < 2:
        parser.error(f"--max-model-len must be at least 2, for a prompt and an answer, not {options.max_model_len}")


def _check_speculation(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses invalid options for drafts."""
    if not 0 <= options.speculative_tokens <= SPECULATIVE_TOKENS_MAX:
        given = options.speculative_tokens
        parser.error(f"--speculative-tokens must be from 0 to {SPECULATIVE_TOKENS_MAX}, not {given}")
    if options.draft_model is not None and not options.speculative_tokens:
        parser.error("--draft-model needs --speculative-tokens, for example 4")
    if options.draft_model is not None and (options.tensor_parallel or 1) > 1:
        parser.error("--draft-model cannot be combined with several ranks")
    if not 1 <= options.prompt_lookup_min <= options.prompt_lookup_max <= PROMPT_LOOKUP_MAX:
        given = f"{options.prompt_lookup_min} and {options.prompt_lookup_max}"
        what = f"must rise, from 1 to {PROMPT_LOOKUP_MAX}, not be {given}"
        parser.error(f"--prompt-lookup-min and --prompt-lookup-max {what}")


def _add_tls(parser: argparse.ArgumentParser) -> None:
    to_allocator = parser.add_argument_group("TLS for the connection to the allocator, as PEM files")
    for name, text in (
        ("ca", "certificate authorities of the allocator; turns TLS on for this connection"),
        ("cert", "certificate that the worker shows to it"),
        ("key", "private key of that certificate"),
    ):
        variable = f"QUIRE_TLS_{name.upper()}"
        to_allocator.add_argument(
            f"--allocator-{name}",
            metavar="FILE",
            default=os.environ.get(variable),
            help=f"{text} (default: ${variable})",
        )


def _add_formats(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the format and the device of weights and pages."""
    parser.add_argument(
        "--dtype",
        type=lambda name: DTYPE_NICKNAMES.get(name, name),
        choices=["auto", *DTYPE_NICKNAMES.values()],
        default="auto",
        help="dtype of the weights, also written fp32, bf16 or fp16; auto: float32 on a CPU, and the checkpoint's on "
        "a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=list(KV_CACHE_DTYPES),
        default="auto",
        help="dtype of keys and values in pages: auto is the dtype of the weights; fp8 divides by the checkpoint's "
        "k_scale and v_scale, or by 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-layout",
        choices=list(KV_LAYOUTS),
        default="NHD",
        help="order of tokens, heads and dims in a page (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="device of the model and its pages: cuda runs Triton kernels; cpu runs C++ kernels, or plain torch if "
        "there is no compiler (default: %(default)s)",
    )
    parser.add_argument(
        "--swap-memory",
        type=memory_bytes,
        default=0,
        help="host memory, such as 2GiB, for pages of preempted samples; a sample that resumes is restored from it "
        "if that is estimated to be cheaper than recomputing (default: none)",
    )


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    """Adds the options for drafted tokens."""
    speculation = parser.add_argument_group(
        "speculative decoding, by prompt lookup (for texts that repeat themselves or their prompt) or by a draft "
        "model; it does not change texts"
    )
    speculation.add_argument(
        "--speculative-tokens",
        type=int,
        default=0,
        metavar="COUNT",
        help="tokens drafted for each sample in a pass, by --draft-model, or copied from the text after an earlier "
        "occurrence of the last tokens; 0: none (default: %(default)s)",
    )
    speculation.add_argument(
        "--draft-model",
        metavar="FOLDER",
        help="smaller checkpoint with the same vocabulary and only full attention, which drafts instead of the "
        "lookup; its pages take part of the pool's memory",
    )
    for name, text in (("min", "fewest"), ("max", "most")):
        speculation.add_argument(
            f"--prompt-lookup-{name}",
            type=int,
            default=5,
            metavar="COUNT",
            help=f"{text} last tokens of a text that the lookup searches for (default: %(default)s)",
        )


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    """Adds the options for LoRA adapters."""
    adapters = parser.add_argument_group("LoRA adapters, as PEFT saves them; each request may choose one")
    adapters.add_argument(
        "--adapter",
        action="append",
        type=named_folder,
        default=[],
        metavar="NAME=FOLDER",
        help="load this adapter at start; may be repeated",
    )
    adapters.add_argument(
        "--adapter-folder",
        metavar="FOLDER",
        help="folder from which `quire adapter load` may load further adapters (default: none)",
    )
    adapters.add_argument("--max-adapters", type=int, default=16, help="most adapters at a time (default: %(default)s)")
    adapters.add_argument("--max-adapter-rank", type=int, default=64, help="largest rank (default: %(default)s)")
    adapters.add_argument(
        "--adapter-memory", type=memory_bytes, default=1 << 30, help="memory of all loaded adapters (default: 1GiB)"
    )


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a model that several processes compute."""
    ranks = parser.add_argument_group("tensor parallelism; torchrun can start the ranks, too, even on several machines")
    ranks.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="processes (ranks) on this machine that compute the model together, each with its attention heads and "
        "its part of every MLP; --kv-memory counts per rank (default: 1, or as many as torchrun has started)",
    )
    ranks.add_argument(
        "--rank-timeout",
        type=float,
        metavar="SECONDS",
        default=60.0,
        help="if a rank is silent this long, all ranks end (default: %(default)s)",
    )
    ranks.add_argument(
        "--trusted-rank-network",
        action="store_true",
        help="allow ranks on several machines; their messages are neither encrypted nor authenticated",
    )
