"""Random scenarios: a number, as the seed, draws a model, a workload and a load.

The rules of retention were tuned on the shapes of `shapes.py` and the sizes of `workloads.py`. Other scenarios show
whether the rules hold beyond these. A scenario has 1 to 8 layers of full attention, and one to nine times as many
layers with one or two windows, or with states of 128 KiB to 2 MiB. Chats, edits, shared prompts and agents have other
lengths and numbers. Each doubling of a size is equally likely.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quire.planning import LayerSpec
from quire.types import GroupKind

from hybrid_sides.shapes import Shape
from hybrid_sides.workloads import FULL_SCALE, WORKLOADS, Request, Scale

PROMPT_TOKENS_MAX: Final = 4_000_000  # the most tokens of all requests of a scenario; five of the first 900 have more


@dataclass(frozen=True)
class Scenario:
    """A drawn scenario.

    Attributes:
        shape: the layers of the model.
        workload: the name of the workload.
        load: working set divided by pool.
        scale: the sizes of the workload.
    """

    shape: Shape
    workload: str
    load: float
    scale: Scale

    def requests(self) -> list[Request]:
        """Returns the requests; none if they have more than `PROMPT_TOKENS_MAX` tokens."""
        requests = list(WORKLOADS[self.workload](self.scale))
        tokens = sum(request.prompt_token_count for request in requests)
        return requests if tokens <= PROMPT_TOKENS_MAX else []


def draw(number: int, loads: Sequence[float]) -> Scenario:
    """Returns the scenario of a number; the same number always gives the same scenario."""
    dice = random.Random(number)
    shape, scale = _shape(dice), _scale(dice)
    return Scenario(shape, dice.choice(list(WORKLOADS)), dice.choice(loads), scale)


def _shape(dice: random.Random) -> Shape:
    kind = dice.choice(["window", "window", "window", "states", "states", "two windows"])
    head_count, head_dim = dice.choice([2, 4, 8]), dice.choice([64, 128])
    full_count = dice.randint(1, 8)
    windows: list[tuple[int, int]] = []  # (window size, number of layers with this window)
    state_kib = state_count = 0
    if kind == "states":
        state_kib = dice.choice([128, 256, 512, 1024, 2048])
        state_count = full_count * dice.choice([1, 3, 7, 9])
    else:
        window = dice.choice([64, 128, 256, 512, 1024, 2048, 4096])
        windows.append((window, full_count * dice.choice([1, 2, 3, 5, 7])))
        other = dice.choice([64, 256, 1024, 2048]) if kind == "two windows" else window
        if other != window:
            windows.append((other, dice.randint(1, 2 * full_count)))
    attention = [(GroupKind.FULL_ATTENTION, 0)] * full_count
    for window, count in windows:
        attention += [(GroupKind.SLIDING_WINDOW, window)] * count
    layers = [
        LayerSpec(number, kind, kv_head_count=head_count, head_dim=head_dim, window=window)
        for number, (kind, window) in enumerate(attention)
    ]
    states = range(len(layers), len(layers) + state_count)
    layers += [LayerSpec(number, GroupKind.STATE, state_bytes=state_kib << 10) for number in states]
    parts = [f"{full_count} full", *[f"{count} x {window}" for window, count in windows]]
    parts += [f"{state_count} x {state_kib} KiB"] if state_count else []
    return Shape(f"{' + '.join(parts)} ({head_count} x {head_dim})", tuple(layers))


def _scale(dice: random.Random) -> Scale:
    def size(least: int, most: int) -> int:
        return round(least * (most / least) ** dice.random())

    return FULL_SCALE._replace(
        chat_count=size(6, 40),
        round_count=size(3, 10),
        first_tokens=size(300, 12_000),
        message_tokens=size(20, 1_500),
        answer_tokens=size(20, 800),
        system_tokens=size(300, 8_000),
        system_count=size(3, 20),
        user_count=size(3, 14),
        task_count=size(3, 6),
    )
