"""MLPs by their intermediate elements, those of experts included.

An MLP is known by its shapes: one linear layer back to the hidden size, and one or two up from it, whose outputs may be
those of a gate and of the values beside each other (packed), in halves or by turns. There are several ways to read the
same shapes; each is tried on drawn numbers, and the one is taken that gives what the whole module gives
(`splitter.agrees`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire_worker.model.splitting.linear_parts import Split, is_plain, on_one_rank, some_inputs, some_outputs, span
from quire_worker.ranks.crew import Crew


def mlp_splits(module: torch.nn.Module, hidden_size: int, crew: Crew) -> Iterator[Split]:
    """Returns the ways in which a rank may have a part of an MLP, the likeliest first; none where it is no MLP.

    Args:
        module: of the model.
        hidden_size: elements that it reads and gives for each token.
        crew: of the rank.
    """
    linears = {name: child for name, child in module.named_children() if is_plain(child)}
    weights = {id(parameter) for child in linears.values() for parameter in child.parameters()}
    if not 2 <= len(linears) <= 3 or any(id(parameter) not in weights for parameter in module.parameters()):
        return
    for down in reversed(linears):  # it usually comes last
        middle = linears[down].in_features
        ups = [name for name in linears if name != down]
        if linears[down].out_features != hidden_size or middle % crew.size:
            continue
        if any(linears[name].in_features != hidden_size for name in ups):
            continue
        for index in _readings([linears[name].out_features for name in ups], middle, crew):
            parts: dict[str, torch.nn.Module | torch.nn.Parameter] = {
                name: some_outputs(linears[name], index) for name in ups
            }
            parts[down] = some_inputs(linears[down], span(middle, crew), crew)
            yield Split(parts, _narrower(module, middle, crew))


def expert_splits(module: torch.nn.Module, hidden_size: int, crew: Crew) -> Iterator[Split]:
    """Returns the same of a module that holds the weights of all experts in `gate_up_proj` and `down_proj`, with
    outputs before inputs or after them, and perhaps biases."""
    own = dict(module.named_parameters())
    if not {"gate_up_proj", "down_proj"} <= own.keys() <= {
        "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"
    }:  # fmt: skip
        return
    up, down = own["gate_up_proj"], own["down_proj"]
    for outputs, inputs in ((1, 2), (2, 1)):
        if up.shape[inputs] != hidden_size or down.shape[outputs] != hidden_size:
            continue
        middle = down.shape[inputs]
        for index in _readings([up.shape[outputs]], middle, crew):
            parts = {
                "gate_up_proj": up.index_select(outputs, index),
                "down_proj": down.index_select(inputs, span(middle, crew)),
            }
            if "gate_up_proj_bias" in own:
                parts["gate_up_proj_bias"] = own["gate_up_proj_bias"][:, index]
            if "down_proj_bias" in own:
                parts["down_proj_bias"] = on_one_rank(own["down_proj_bias"], crew)
            frozen = {name: torch.nn.Parameter(part, requires_grad=False) for name, part in parts.items()}
            yield Split({**frozen}, _narrower(module, middle, crew))


def _readings(outputs: list[int], middle: int, crew: Crew) -> Iterator[torch.Tensor]:
    """Which outputs of the layers up belong to a rank's intermediate elements, for each way to read them."""
    if middle % crew.size or len(set(outputs)) != 1:
        return
    mine = span(middle, crew)
    if outputs[0] == middle:
        yield mine
    elif outputs == [2 * middle]:
        yield torch.cat([mine, middle + mine])  # halves
        yield torch.stack([2 * mine, 2 * mine + 1], dim=1).flatten()  # by turns


def _narrower(module: torch.nn.Module, middle: int, crew: Crew) -> dict[str, int]:
    """Numbers of the module by which it shapes what is in the middle."""
    return {
        name: middle // crew.size
        for name in ("intermediate_size", "intermediate_dim", "expert_dim")
        if getattr(module, name, None) == middle
    }
