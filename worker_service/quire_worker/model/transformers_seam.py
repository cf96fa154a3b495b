"""The seam between transformers and paged attention.

transformers is the model zoo: it builds the layers and reads the weights. Its attention calls a function chosen by
name, and `quire_paged` is Quire's. The keyword argument `quire_step` carries the data of a forward pass. transformers
passes it unchanged through every layer, so no global state is needed:

    run -> module(..., quire_step=step) -> each layer -> paged_attention_forward -> step.attend

No mask function is registered under that name, so transformers leaves `attention_mask` None. The model's cache is
a view that stores nothing (`PositionsView`), so attention gets only the keys and values of the new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from quire_worker.attention import AttentionPlan
from quire_worker.cache import LayerCache
from quire_worker.model import latent
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.rotary import TokenLengths
from quire_worker.model.states.mixers import CacheView
from quire_worker.model.states.state_pass import StatePass, StateProbe
from quire_worker.model.support import Arrival, refuse_unsupported_options

ATTENTION_NAME = "quire_paged"


class Scoring(NamedTuple):
    """Options of a layer's attention, with the names of `AttentionPlan.attend`.

    Attributes:
        sliding_window: tokens that a query sees, itself included; None: all.
        sinks: `[query_heads]`.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float
    sinks: torch.Tensor | None


class Step(Protocol):
    """The forward pass that layers call. Tensors are ragged, `[tokens, heads, head_dim]`."""

    @property
    def states(self) -> StatePass | StateProbe | None:
        """Returns the states of recurrent layers; None if no layer has any."""
        ...

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Takes a layer's new queries, keys and values, and returns the result of attention.

        For latent attention the keys are the latents, and the values are a view of their first elements.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """A step that writes new keys and values to the layer's pages, then attends over the pages.

    `plans` has one plan for each kind of layer (`LayerCache.kind`). For `before_kernels` see `PagedModel.forward`.
    """

    plans: Sequence[AttentionPlan]
    layers: Mapping[int, LayerCache]
    states: StatePass | None = None
    before_kernels: Callable[[], None] | None = None

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Writes keys and values to the layer's pages, unless another layer did, then attends over the pages."""
        layer = self.layers[layer_index]
        if scoring.sliding_window != layer.window:
            raise UnsupportedModelError(
                f"layer {layer_index} has the sliding window {scoring.sliding_window}, which differs from its "
                "first pass"
            )
        plan = self.plans[layer.kind]
        if layer.is_written:
            plan.append(key, value, layer.pages, scales=layer.scales)
        return plan.attend(
            query,
            layer.pages,
            scale=scoring.scale,
            window_left=-1 if layer.window is None else layer.window - 1,
            soft_cap=scoring.soft_cap,
            sinks=scoring.sinks,
            scales=layer.scales,
        )


class ProbeStep:
    """The step of a model's first pass. The step computes no attention, and records each layer's inputs."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.arrivals: dict[int, Arrival] = {}
        self.states = StateProbe(batch)

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Records and checks the shapes that arrive. The result is zeros of the right shape."""
        if layer_index in self.arrivals:
            raise UnsupportedModelError(f"layer {layer_index} calls attention twice")
        is_latent = key.data_ptr() == value.data_ptr()
        fits = is_latent or key.shape == value.shape
        if not fits or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
            shapes = " and ".join(str(list(tensor.shape[1:])) for tensor in (query, key, value))
            raise UnsupportedModelError(f"queries, keys and values of {shapes} heads and dims do not fit into one page")
        latent_dim = value.shape[-1] if is_latent else None
        self.arrivals[layer_index] = Arrival(key, latent_dim, scoring.sliding_window)
        return query.new_zeros(*query.shape[:2], value.shape[-1])


class PositionsView(CacheView):
    """The cache that a model sees in a forward pass.

    The view stores no keys and values, because these are in pages. The number of earlier tokens differs for each token
    of a flat batch. Only mixers read states; each gets a view of one segment.
    """

    def __init__(self, position_ids: torch.Tensor, states: StatePass | StateProbe | None = None) -> None:
        """Takes the positions of one forward pass, int64 `[1, tokens]`, and its states."""
        super().__init__(states)
        self._position_ids = position_ids

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Returns each token's position minus its index, int64 `[tokens]`.

        Models add `arange(tokens)` to this value, which gives the positions. From that sum, Llama 4 computes the
        temperature of its layers without rotary positions.
        """
        positions = self._position_ids[0]
        return positions - torch.arange(positions.shape[0], device=positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new keys and values, without storing them."""
        return key_states, value_states


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of one layer. transformers calls this function.

    Args:
        module: the layer's attention module; its `layer_idx` is the layer's number.
        query: `[1, query_heads, tokens, head_dim]`, rotated.
        key: `[1, kv_heads, tokens, head_dim]`, rotated; new tokens only. Of latent attention, `[1, 1, tokens, rank]`.
        value: `[1, kv_heads, tokens, head_dim]`. Of latent attention, the rotated key, `[1, 1, tokens, rope dims]`.
        attention_mask: None.
        quire_step: the forward pass.
        scaling: factor of the dot products; None is `head_dim ** -0.5`.
        dropout: 0.
        sliding_window: tokens that a query sees, itself included (Mistral, Gemma, gpt-oss).
        softcap: bound of the scores (Gemma 2).
        s_aux: `[query_heads]`, sinks of the softmax (gpt-oss).
        options: other options that the model passes; unsupported ones are refused.

    Returns:
        `[1, tokens, query_heads, head_dim]`, and None for the attention weights.

    Raises:
        UnsupportedModelError: an option is not supported, or the model did not pass on `quire_step`.
    """
    if quire_step is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
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
    scoring = Scoring(scale, sliding_window, softcap or 0.0, s_aux)
    queries, keys, values = _ragged(query), _ragged(key), _ragged(value)
    if not latent.is_latent(module):
        return quire_step.attend(layer_index, queries, keys, values, scoring).unsqueeze(0), None
    both = torch.cat([keys, values], dim=2)  # latents, then rotated keys
    queries = latent.absorbed(module, queries)
    attended = quire_step.attend(layer_index, queries, both, both[..., : keys.shape[2]], scoring)
    return latent.values_of(module, attended).unsqueeze(0), None


def run(module: torch.nn.Module, batch: ForwardBatch, step: Step, lengths: TokenLengths | None = None) -> torch.Tensor:
    """Runs a model over a batch.

    Args:
        module: a model of transformers.
        batch: a batch on the model's device.
        step: the step that the model's layers call.
        lengths: the object with the lengths for the rotary embeddings, if their frequencies depend on lengths.

    Returns:
        float32 `[rows, vocabulary]`, one row per chunk that needs logits.
    """
    with torch.inference_mode():
        if lengths is not None:
            lengths.of_pass = batch.lengths.to(batch.input_ids.device)
        output = module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            past_key_values=PositionsView(batch.position_ids, step.states),
            use_cache=False,
            logits_to_keep=batch.logits_index,
            quire_step=step,
        )
        logits: torch.Tensor = output.logits[0].to(torch.float32)
        if step.states is not None:
            step.states.finish()
        return logits


def _ragged(heads: torch.Tensor) -> torch.Tensor:
    """Views `[1, heads, tokens, head_dim]` as `[tokens, heads, head_dim]`."""
    return heads[0].transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
