"""`quire plan`: shows the layout of a model's cache, and how many tokens fit into a device's memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from quire.cli import options
from quire.cli.model_config import config_path, read_config
from quire.errors import UsageError

if TYPE_CHECKING:
    from quire.cli.plan_report import Weights

EXAMPLES = """Plan the KV cache of a model: groups, pages, blocks, and how many sequences and idle chats fit.

Needs the model's config.json and nothing else: no weights, no GPU, no torch.

Examples:

    quire plan models/demo --memory 2GiB --length 1000
    quire plan config.json --memory 80GiB --utilization 0.9 --tensor-parallel 8 --weights 141GB
    quire plan config.json --memory 80GiB --chat-tokens 8k --chat-tokens 30k
    quire plan Qwen/Qwen3-0.6B --memory 24GiB --dtype fp8 --max-len 32k     (with huggingface_hub installed)
"""
LENGTH_MAX: Final = 32_768  # tokens; used if neither the command line nor the model gives a longest sequence


Tokens: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TOKENS", help="Longest sequence; 32k is 32,768. Default: the model's maximum.")
]
Chats: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOKENS", help="Length of idle chats to count; may be repeated. Default: the values of --length."
    ),
]
ModelOrConfig: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_CONFIG",
        help="A config.json, a folder with one, or a model id of Hugging Face.",
        show_default=False,
    ),
]
INT32_MAX: Final = 2**31 - 1
CheckpointTokens: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=INT32_MAX,
        metavar="TOKENS",
        help="Interval of the checkpoints of recurrent states. Default: 256 to 4,096, by model.",
    ),
]
AllWeights: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Bytes of the model's weights. Default: the size of its files, or an estimate.",
    ),
]
AsWorker: TypeAlias = Annotated[
    bool,
    typer.Option("--worker", help="Show the layout of a worker: blocks of --block-size, and pages of equal parts."),
]
Lengths: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="TOKENS", help="Sequence length to show; may be repeated.")
]


def _share(text: str) -> Any:
    return typer.Option(metavar="SHARE", min=0, max=1, callback=options.is_number, help=text)


def _count(metavar: str, text: str) -> Any:
    return typer.Option(min=1, max=INT32_MAX, metavar=metavar, help=text)


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(help=EXAMPLES)(plan)


def plan(
    model: ModelOrConfig,
    *,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of one device: 80GiB, 80GB. Without it, only the layout."),
    ] = None,
    utilization: Annotated[float, _share("Share of the memory that may be used; above 0.")] = 0.9,
    weights: AllWeights = None,
    used: Annotated[str | None, typer.Option(metavar="SIZE", help="Other used memory of one device.")] = None,
    tensor_parallel: Annotated[int, _count("RANKS", "Devices that split the heads.")] = 1,
    dtype: Annotated[str, typer.Option(help="Dtype of keys and values: auto, bf16, fp16, fp32, fp8.")] = "auto",
    state_dtype: Annotated[str, typer.Option(help="Dtype of recurrent states: auto, bf16, fp32.")] = "auto",
    max_len: Tokens = None,
    block_size: Annotated[int, _count("TOKENS", "Tokens in the smallest blocks.")] = 16,
    group_cost: Annotated[float, _share("Price of a group, as a share of a sequence's bytes.")] = 0.005,
    checkpoint_tokens: CheckpointTokens = None,
    worker: AsWorker = False,
    length: Lengths = None,
    chat_tokens: Chats = None,
    as_json: options.Json = False,
) -> None:
    """Prints the layout of a model's cache."""
    from quire import planning
    from quire.cli.plan_report import Budget, Plan, Weights
    from quire.planning.planner import BLOCK_SIZE_MAX

    if not utilization:
        raise UsageError("--utilization must be above 0 and at most 1, not 0")
    config = read_config(config_path(model))
    try:
        _check_dtypes(dtype, state_dtype)
        cache = planning.read_config(
            config,
            dtype,
            tensor_parallel,
            state_dtype,
            state_ranks=1,
            model_dtype=_computed_in(dtype) if worker else None,
        )
        token_count_max = (
            _parsed("--max-len", planning.parse_tokens, max_len) if max_len else cache.token_count_max or LENGTH_MAX
        )
        layout = planning.plan_layout(
            cache.layers,
            block_size=block_size,
            block_size_max=block_size if worker else BLOCK_SIZE_MAX,
            even_pages=worker,
            token_count_max=token_count_max,
            group_cost=group_cost,
            checkpoint_tokens=checkpoint_tokens,
        )
        cost = planning.Prices(cache.layers, token_count_max=token_count_max, group_cost=group_cost).layout(layout)
        shown = (_parsed("--length", planning.parse_tokens, each) for each in length or ())
        lengths = tuple(sorted({*planning.lengths_up_to(token_count_max), *shown}))
        chats = tuple(_parsed("--chat-tokens", planning.parse_tokens, each) for each in chat_tokens or ())
        budget = None
        if memory is not None:
            # --used may already include the weights, so an estimate of them is not added to it.
            taken = _weights(weights, model, config) if weights or not used else Weights(0, "")
            used_bytes = (_with_unit("--used", used) if used else 0) - (-taken.byte_count // tensor_parallel)
            budget = Budget.of(layout, _with_unit("--memory", memory), utilization, used_bytes, taken)
        elif weights or used:
            raise UsageError("--weights and --used are subtracted from --memory: give it, too, as in --memory 80GiB")
    except ValueError as error:
        raise UsageError(str(error)) from None
    made = Plan(cache, layout, cost, tensor_parallel, lengths, chats or lengths, budget, block_size)
    if as_json:
        print(json.dumps(made.as_json()))
    else:
        made.show()


def _computed_in(dtype: str) -> str | None:
    """Returns a worker's dtype of computation for keys and values of `dtype`. None means the model's own."""
    return None if dtype == "auto" or dtype.startswith(("fp8", "float8")) else dtype


def _check_dtypes(dtype: str, state_dtype: str) -> None:
    """Checks both dtypes, even if the model has only keys or only states.

    Raises:
        ValueError: a dtype is unknown.
    """
    from quire import planning

    for option, said in (("--dtype", dtype), ("--state-dtype", state_dtype)):
        if said != "auto":
            _parsed(option, planning.element_bytes_of, said)


def _parsed(option: str, parse: Callable[[str], int], text: str) -> int:
    """Returns an option's parsed value.

    Raises:
        ValueError: the text cannot be parsed. The message has the option's name.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _with_unit(option: str, text: str) -> int:
    """Returns the bytes of a size with a unit. A unit is required: a bare 80 could mean bytes or gigabytes.

    Raises:
        ValueError: the text is not a size, or has no unit.
    """
    from quire import planning

    byte_count = _parsed(option, planning.parse_bytes, text)
    if text.strip().replace(".", "").isdigit():
        raise ValueError(f"{option} {text:.80} has no unit: write {text}GiB, {text}GB or {text}B")
    return byte_count


def _weights(said: str | None, model: str, config: dict[str, Any]) -> Weights:
    """Returns the weights' bytes: the option's value, else the size of the folder's files, else an estimate.

    Raises:
        ValueError: the option's value is not a size.
    """
    from quire import planning
    from quire.cli.plan_report import Weights

    if said:
        return Weights(_with_unit("--weights", said), "")
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if files:
        return Weights(sum(file.stat().st_size for file in files), "")
    try:
        estimate = planning.weight_bytes(config)
    except planning.ConfigError:
        estimate = None
    if estimate is None:
        return Weights(0, "weights are not subtracted from the memory: give --weights or --used")
    size = f"{estimate / (1 << 30):,.1f} GiB"
    return Weights(estimate, f"weights are estimated at {size} from the configuration: give them with --weights")
