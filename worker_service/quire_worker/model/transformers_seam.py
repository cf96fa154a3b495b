"""The seam between transformers and paged attention.

transformers is the model zoo: it builds the layers and reads the weights. Its attention calls a function chosen by
name, and `quire_paged` is ours. What a forward pass needs comes in the keyword argument `quire_step`, which
transformers hands through every layer untouched, so nothing is global:

    run -> module(..., quire_step=step) -> each layer -> paged_attention_forward -> step.attend

No mask function is registered under that name, so transformers leaves `attention_mask` None; no cache is passed, so
keys and values arrive for the new tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import AttentionInterface

from quire_worker.attention import AttentionPlan
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.support import refuse_unsupported_options

ATTENTION_NAME = "quire_paged"


class Step(Protocol):
    """One forward pass, as the layers see it. Tensors are ragged, `[tokens, heads, head_dim]`."""

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Takes a layer's new keys and values, and returns what its queries attend to."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """A real one: writes the layer's pages, then reads them."""

    plan: AttentionPlan
    layers: tuple[torch.Tensor, ...]

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Writes keys and values into the layer's pages, then attends over them."""
        pages = self.layers[layer_index]
        self.plan.append(key, value, pages)
        return self.plan.attend(query, pages, scale=scale)


class ProbeStep:
    """The first one of a model: computes nothing, and notes what arrives in each layer."""

    def __init__(self) -> None:
        self.key_of_layer: dict[int, torch.Tensor] = {}

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Notes the shapes that arrive; the result has the right shape and no sense."""
        if layer_index in self.key_of_layer:
            raise UnsupportedModelError(f"layer {layer_index} attends twice")
        if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
            shapes = " and ".join(str(list(tensor.shape[1:])) for tensor in (query, key, value))
            raise UnsupportedModelError(f"queries, keys and values of {shapes} heads and dims do not fit one page")
        self.key_of_layer[layer_index] = key
        return torch.zeros_like(query)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    quire_step: Step | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for the attention of one layer.

    Args:
        module: the layer's attention; its `layer_idx` says which layer's pages.
        query: `[1, query_heads, tokens, head_dim]`, rotated.
        key: `[1, kv_heads, tokens, head_dim]`, rotated; new tokens only.
        value: `[1, kv_heads, tokens, head_dim]`.
        attention_mask: None.
        quire_step: the forward pass.
        scaling: factor of the dot products; None is `head_dim ** -0.5`.
        dropout: 0.
        options: anything else the model passes; what is not understood is refused.

    Returns:
        `[1, tokens, query_heads, head_dim]`, and None for the attention weights.

    Raises:
        UnsupportedModelError: the layer asks for something that would have to be dropped, or dropped `quire_step`.
    """
    if quire_step is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not hand keyword arguments to its attention")
    refuse_unsupported_options(
        type(module).__name__,
        options
        | {
            "attention_mask": attention_mask,
            "dropout": dropout or None,
            "is_causal": options.get("is_causal", getattr(module, "is_causal", None)),
        },
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_index: int = module.layer_idx  # type: ignore[assignment]  # a plain attribute of every attention module
    attended = quire_step.attend(layer_index, _ragged(query), _ragged(key), _ragged(value), scale)
    return attended.unsqueeze(0), None


def run(module: torch.nn.Module, batch: ForwardBatch, step: Step) -> torch.Tensor:
    """Runs a model over a batch.

    Returns:
        float32 `[rows, vocabulary]`, one row per chunk that needs logits.
    """
    with torch.inference_mode():
        output = module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            past_key_values=None,
            use_cache=False,
            logits_to_keep=batch.logits_index,
            quire_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.to(torch.float32)


def _ragged(heads: torch.Tensor) -> torch.Tensor:
    """`[1, heads, tokens, head_dim]` as `[tokens, heads, head_dim]`, the same memory."""
    return heads[0].transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
