"""The seam between transformers and paged attention.

transformers is the model zoo: it builds the layers and reads the weights. Its attention calls a function chosen by
name, and `quire_paged` is ours. What a forward pass needs comes in the keyword argument `quire_step`, which
transformers hands through every layer untouched, so nothing is global:

    run -> module(..., quire_step=step) -> each layer -> paged_attention_forward -> step.attend

No mask function is registered under that name, so transformers leaves `attention_mask` None. The cache that it gets is
a view that keeps nothing (`PositionsView`), so keys and values arrive for the new tokens only.
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
    """Scoring of keys in a layer, in the words of `AttentionPlan.attend`.

    Attributes:
        sliding_window: tokens that a query sees, itself included; None: all before it.
        sinks: `[query_heads]`.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float
    sinks: torch.Tensor | None


class Step(Protocol):
    """One forward pass, as the layers see it. Tensors are ragged, `[tokens, heads, head_dim]`."""

    @property
    def states(self) -> StatePass | StateProbe | None:
        """Returns where recurrent layers keep their states; None where no layer has any."""
        ...

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Takes a layer's new keys and values, and returns what its queries attend to. Latents are keys, and values are
        their first elements: the same memory."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """A real one: writes the layer's pages, then reads them. `plans` are by the layers' kinds; `before_kernels` is that
    of `PagedModel.forward`."""

    plans: Sequence[AttentionPlan]
    layers: Mapping[int, LayerCache]
    states: StatePass | None = None
    before_kernels: Callable[[], None] | None = None

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Writes keys and values into the layer's pages, unless another layer has, then attends over them."""
        layer = self.layers[layer_index]
        if scoring.sliding_window != layer.window:
            raise UnsupportedModelError(
                f"layer {layer_index} has another sliding window than in its first pass: {scoring.sliding_window}"
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
    """The first one of a model: computes nothing, and notes what arrives in each layer."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.arrivals: dict[int, Arrival] = {}
        self.states = StateProbe(batch)

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Notes the shapes that arrive; the result has the right shape and no sense."""
        if layer_index in self.arrivals:
            raise UnsupportedModelError(f"layer {layer_index} attends twice")
        is_latent = key.data_ptr() == value.data_ptr()
        fits = is_latent or key.shape == value.shape
        if not fits or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
            shapes = " and ".join(str(list(tensor.shape[1:])) for tensor in (query, key, value))
            raise UnsupportedModelError(f"queries, keys and values of {shapes} heads and dims do not fit one page")
        latent_dim = value.shape[-1] if is_latent else None
        self.arrivals[layer_index] = Arrival(key, latent_dim, scoring.sliding_window)
        return query.new_zeros(*query.shape[:2], value.shape[-1])


class PositionsView(CacheView):
    """A cache as a model sees it.

    Keys and values lie in pages; a layer sees only its own new ones. The number of earlier tokens differs for each
    token of a flat batch. Only mixers read states; each gets a view of one segment.
    """

    def __init__(self, position_ids: torch.Tensor, states: StatePass | StateProbe | None = None) -> None:
        """Keeps the positions of one forward pass, int64 `[1, tokens]`, and its states."""
        super().__init__(states)
        self._position_ids = position_ids

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Returns int64 `[tokens]`, each token's position minus its index: `arange(tokens)` plus this is positions.

        Llama 4 computes the temperature of its layers without rotary positions from that sum.
        """
        positions = self._position_ids[0]
        return positions - torch.arange(positions.shape[0], device=positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps nothing, and hands back what came."""
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
    """Returns what transformers calls for the attention of one layer.

    Args:
        module: the layer's attention; its `layer_idx` says which layer's pages.
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
    scoring = Scoring(scale, sliding_window, softcap or 0.0, s_aux)
    queries, keys, values = _ragged(query), _ragged(key), _ragged(value)
    if not latent.is_latent(module):
        return quire_step.attend(layer_index, queries, keys, values, scoring).unsqueeze(0), None
    both = torch.cat([keys, values], dim=2)  # latents, and what is rotated
    queries = latent.absorbed(module, queries)
    attended = quire_step.attend(layer_index, queries, both, both[..., : keys.shape[2]], scoring)
    return latent.values_of(module, attended).unsqueeze(0), None


def run(module: torch.nn.Module, batch: ForwardBatch, step: Step, lengths: TokenLengths | None = None) -> torch.Tensor:
    """Runs a model over a batch.

    Args:
        module: of transformers.
        batch: on its device.
        step: what its layers call.
        lengths: where its rotary embeddings look, if their frequencies follow lengths.

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
    """Returns `[1, heads, tokens, head_dim]` as `[tokens, heads, head_dim]`, the same memory."""
    return heads[0].transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
