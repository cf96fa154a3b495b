"""The pass over a model: each rewrite is tried on a module's recorded inputs, and kept if its output agrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from quire_cpu.library import Library

from quire_worker.model.rewrites.attention import AttentionRewrite
from quire_worker.model.rewrites.decoder import DecoderRewrite
from quire_worker.model.rewrites.decoder_layer import DecoderLayerRewrite
from quire_worker.model.rewrites.gated_mlp import GatedMlpRewrite
from quire_worker.model.rewrites.interface import Rewrite, is_plain_linear
from quire_worker.model.rewrites.linear import Linear, LinearRewrite, packed_of
from quire_worker.model.rewrites.norm import NormRewrite
from quire_worker.model.rewrites.recording import RecordedCall, Recording
from quire_worker.model.rewrites.text_model import TextModelRewrite
from quire_worker.model.rewrites.tied_head import PackedEmbedding

# Largest allowed difference of a result: norm of the difference over norm of the original. Differences from another
# order of sums, or from other roundings of bfloat16, stay below this tolerance. A wrong activation or a missing bias
# causes tens of percent.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

TIED_HEAD = "TiedHead"

CallOf: TypeAlias = Callable[[torch.nn.Module], RecordedCall | None]


class Rewritten(NamedTuple):
    """A model after the pass.

    Attributes:
        module: the same model, or its replacement.
        counts: number of applications of each rewrite, by the name of its class.
    """

    module: torch.nn.Module
    counts: Counter[str]


def rewrite(
    module: torch.nn.Module,
    library: Library,
    run: Callable[[Recording], object],
    *,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> Rewritten:
    """Rewrites the parts of a model in place, then replaces the model as a whole if it can.

    Args:
        module: a transformers model on a CPU, for inference.
        library: the kernels.
        run: makes the model compute one batch of a few tokens, with a step from `Recording.step`.
        is_wanted: returns whether to try a rewrite, by its name; for benchmarks.
    """

    def wanted(*rewrites: Rewrite) -> tuple[Rewrite, ...]:
        return tuple(each for each in rewrites if is_wanted(type(each).__name__))

    recording = Recording()
    with torch.inference_mode():
        recording.record(module, run)
        parts = wanted(
            AttentionRewrite(library, recording),
            GatedMlpRewrite(library),
            NormRewrite(library),
            LinearRewrite(library, _shared_weights(module)),
        )
        wholes = wanted(DecoderLayerRewrite(), DecoderRewrite())
        done = RewritePass(recording, parts, wholes, wanted(TextModelRewrite()))
        if is_wanted(TIED_HEAD):
            done.pack_tied_head(module, library)
        done.visit(module)
        whole = done.whole(module)
    return Rewritten(whole, done.counts)


class RewritePass:
    """The rewriting of one model. An object is used once."""

    def __init__(
        self,
        recording: Recording,
        parts: Sequence[Rewrite],
        wholes: Sequence[Rewrite],
        models: Sequence[Rewrite] = (),
    ) -> None:
        """Takes the recording and the rewrites.

        Args:
            recording: the recording of the model.
            parts: rewrites that are tried on a module before its children are visited, the largest pattern first.
            wholes: rewrites that are tried after the children, because they consist of the children's replacements.
            models: rewrites that are tried last, on the model itself.
        """
        self.counts: Counter[str] = Counter()
        self._recording = recording
        self._parts = parts
        self._wholes = wholes
        self._models = models

    def visit(self, module: torch.nn.Module) -> None:
        """Rewrites all modules inside a module."""
        # A list of names, because a list of child modules would keep replaced modules alive.
        for name in [name for name, _ in module.named_children()]:
            child = module.get_submodule(name)
            if not self._replace(module, name, child, self._parts, self._recording.calls.get):
                self.visit(child)
                self._replace(module, name, child, self._wholes, self._as_it_is)
            for part in child.modules():
                self._recording.calls.pop(part, None)  # otherwise the recording would keep the replaced weights alive

    def whole(self, model: torch.nn.Module) -> torch.nn.Module:
        """Returns the replacement of a model with rewritten parts, or the model itself if there is none."""
        return self._found(model, self._models, self._as_it_is) or model

    def _as_it_is(self, module: torch.nn.Module) -> RecordedCall | None:
        """Returns the module's recorded call, with the result that the module gives after its parts were rewritten.

        In bfloat16, the roundings of many parts together can exceed the tolerance of one.
        """
        call = self._recording.calls.get(module)
        return call and RecordedCall(call.arguments, call.keywords, module(*call.arguments, **call.keywords))

    def _replace(
        self, parent: torch.nn.Module, name: str, child: torch.nn.Module, rewrites: Iterable[Rewrite], call_of: CallOf
    ) -> bool:
        found = self._found(child, rewrites, call_of)
        if found is not None:
            setattr(parent, name, found)
        return found is not None

    def _found(self, module: torch.nn.Module, rewrites: Iterable[Rewrite], call_of: CallOf) -> torch.nn.Module | None:
        """Returns the first candidate that agrees with the module's call; None if there is none.

        `call_of` is only called if there is a candidate.
        """
        if module not in self._recording.calls:  # the model did not call this module
            return None
        call = None
        for each in rewrites:
            for candidate in each.candidates(module):
                call = call or call_of(module)
                if call is not None and agrees(candidate, call):
                    self.counts[type(each).__name__] += 1
                    return candidate
        return None

    def pack_tied_head(self, module: Any, library: Library) -> None:
        """Packs the weight that an embedding and a head share (see `tied_head`), if no other module shares it."""
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        if type(embedding) is not torch.nn.Embedding or head is None or not is_plain_linear(head):
            return
        if head.weight is not embedding.weight or head.bias is not None:
            return
        calls = [self._recording.calls.get(part) for part in (embedding, head)]
        holders = [part for part in module.modules() if getattr(part, "weight", None) is head.weight]
        if None in calls or len(holders) != 2:
            return
        packed = packed_of(library, head)
        replacements = PackedEmbedding(packed), Linear(packed)
        if all(agrees(part, call) for part, call in zip(replacements, calls, strict=True) if call is not None):
            for part in (embedding, head):
                del self._recording.calls[part]
            module.set_input_embeddings(replacements[0])
            module.set_output_embeddings(replacements[1])
            self.counts[TIED_HEAD] += 1


def agrees(candidate: torch.nn.Module, call: RecordedCall) -> bool:
    """Returns whether a candidate gives the recorded result. A candidate that raises does not agree."""
    try:
        result = candidate(*call.arguments, **call.keywords)
    except (ValueError, TypeError, RuntimeError, LookupError):
        return False
    ours, theirs = _tensor_of(result), _tensor_of(call.result)
    if ours is None or theirs is None or type(result) is not type(call.result):
        return False
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.dtype not in TOLERANCE:
        return False
    difference = (ours.float() - theirs.float()).norm()
    return bool(difference <= TOLERANCE[ours.dtype] * theirs.float().norm())


def _tensor_of(result: Any) -> torch.Tensor | None:
    """Returns a result that is a tensor, or the first item of a tuple or of a transformers output."""
    first = result if isinstance(result, torch.Tensor) else result[0]
    return first if isinstance(first, torch.Tensor) else None


def _shared_weights(module: torch.nn.Module) -> set[int]:
    """Returns the addresses of weights that more than one module holds."""
    holders = Counter(parameter.data_ptr() for part in module.modules() for parameter in part.parameters(recurse=False))
    return {address for address, count in holders.items() if count > 1}
