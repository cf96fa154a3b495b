"""Splits MLPs, including those of experts, by their intermediate elements.

An MLP is recognized by its shapes: one linear layer down to the hidden size, and one or two up from it. The outputs of
a single layer up may be gate and values packed together, in halves or alternating. The same shapes can be read in
several ways. Each split is tried on random numbers. The first split that gives the result of the whole module is used
(`splitter._agrees`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire_worker.model.splitting.linear_parts import Split, is_plain, on_one_rank, some_inputs, some_outputs, span
from quire_worker.ranks.crew import Crew


def mlp_splits(module: torch.nn.Module, hidden_size: int, crew: Crew) -> Iterator[Split]:
    """Yields possible splits of an MLP, the likeliest first; none if the module is not an MLP.

    Args:
        module: a module of the model.
        hidden_size: number of its inputs and outputs per token.
        crew: the rank's crew.
    """
    linears = {name: child for name, child in module.named_children() if is_plain(child)}
    weights = {id(parameter) for child in linears.values() for parameter in child.parameters()}
    if not 2 <= len(linears) <= 3 or any(id(parameter) not in weights for parameter in module.parameters()):
        return
    for down in reversed(linears):  # the down projection is usually the last layer
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
    """Yields possible splits of a module that holds the weights of all experts in `gate_up_proj` and `down_proj`.

    In these weights, outputs may come before or after inputs. There may be biases.
    """
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
    """Yields, for each way to read the layers up, the outputs that belong to the rank's intermediate elements."""
    if middle % crew.size or len(set(outputs)) != 1:
        return
    mine = span(middle, crew)
    if outputs[0] == middle:
        yield mine
    elif outputs == [2 * middle]:
        yield torch.cat([mine, middle + mine])  # if gate and up are the two halves of the outputs
        yield torch.stack([2 * mine, 2 * mine + 1], dim=1).flatten()  # if gate and up alternate


def _narrower(module: torch.nn.Module, middle: int, crew: Crew) -> dict[str, int]:
    """Returns the module's attributes that hold the intermediate size, with the rank's value."""
    return {
        name: middle // crew.size
        for name in ("intermediate_size", "intermediate_dim", "expert_dim")
        if getattr(module, name, None) == middle
    }
