"""The kernels that need no pages. Tensors are on the CPU, float32 or bfloat16, and dense in the last dimension.

Each call makes one structure of pointers, sizes and strides. Invalid arguments raise ValueError here, because the
library checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from ctypes import POINTER, PYFUNCTYPE, byref
from dataclasses import dataclass

import numpy as np
import torch

from quire_cpu.interface import DTYPES, GATES, PANEL, Draw, Embed, Greedy, Linear, Norm, Pack, Rotate
from quire_cpu.library import Library

AT_ONCE_MAX = 1 << 20  # a search of up to this many logits, about 50 us, does not release the GIL


def norm(library: Library, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Computes x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, as RMSNorm is (Zhang and Sennrich,
    2019).

    Args:
        library: the kernels.
        x: `[..., size]`.
        weight: `[size]`, of x's dtype.
        epsilon: added to the mean.
    """
    rows = _rows(x)
    output = torch.empty(x.shape, dtype=x.dtype)
    size = rows.shape[1]
    arguments = Norm(
        rows.data_ptr(), output.data_ptr(), _vector(weight, size, x.dtype).data_ptr(), rows.stride(0), size,
        rows.shape[0], size, _dtype(x), epsilon,
    )  # fmt: skip
    library.functions.quire_norm(byref(arguments))
    return output


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Weights of the RMSNorm of each query head and key head before rotation, as in Qwen3."""

    query: torch.Tensor  # [head_dim]
    key: torch.Tensor  # [head_dim]
    epsilon: float


def rotate_(
    library: Library,
    heads: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    *,
    query_heads: int,
    norms: HeadNorms | None = None,
) -> None:
    """Rotates queries and keys by their positions, in place: x * cos + rotate_half(x) * sin (Su et al., 2021).

    Args:
        library: the kernels.
        heads: `[tokens, query_heads + kv_heads, head_dim]`, dense in its last two dimensions.
        cosine: `[tokens, rotary_dim]` of heads' dtype; the second half repeats the first. Dims of a head beyond
            `rotary_dim` are not rotated.
        sine: as `cosine`.
        query_heads: number of query heads in `heads`; they come first.
        norms: applied to the heads before rotation.
    """
    tokens, head_count, head_dim = heads.shape
    if heads.stride()[1:] != (head_dim, 1):
        raise ValueError(f"heads of a token must be contiguous, not have strides {heads.stride()}")
    if cosine.shape != sine.shape or cosine.shape[0] != tokens or cosine.stride() != sine.stride():
        raise ValueError(f"cosine and sine must be [{tokens}, rotary_dim], not {list(cosine.shape)}")
    rotary_dim = cosine.shape[1]
    if rotary_dim > head_dim or rotary_dim % 2 or cosine.stride(1) != 1 or cosine.dtype != heads.dtype:
        raise ValueError(f"tables of {cosine.dtype} {list(cosine.shape)} cannot rotate heads of {head_dim}")
    query_norm, key_norm, epsilon = (
        (0, 0, 0.0)
        if norms is None
        else (
            _vector(norms.query, head_dim, heads.dtype).data_ptr(),
            _vector(norms.key, head_dim, heads.dtype).data_ptr(),
            norms.epsilon,
        )
    )
    arguments = Rotate(
        heads.data_ptr(), heads.stride(0), cosine.data_ptr(), sine.data_ptr(), cosine.stride(0), 0, query_norm,
        key_norm, tokens, query_heads, head_count - query_heads, head_dim, rotary_dim, _dtype(heads), epsilon,
    )  # fmt: skip
    library.functions.quire_rotate(byref(arguments))


class GreedyChoice:
    """Chooses the likeliest token of each row of logits, and finds the valid rows.

    Reuses its buffers from call to call, so two calls must not run at the same time. Most calls are short and keep the
    GIL, because a thread that releases it must wait to get it back.
    """

    def __init__(self, library: Library, bound: float) -> None:
        """Takes the kernels, and the largest absolute value that a row's maximum may have."""
        self._choose = library.functions.quire_greedy
        self._call: Callable[..., None] = self._choose
        self._choose_at_once = PYFUNCTYPE(None, POINTER(Greedy))(("quire_greedy", library.functions))
        self._arguments = Greedy(bound=bound)
        self._reference = byref(self._arguments)
        self._tokens, self._are_bounded = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
        self._shape: tuple[int, ...] = ()
        self._strides: tuple[int, ...] = ()

    def __call__(self, logits: torch.Tensor) -> tuple[list[int], bytes]:
        """Returns the index of each row's first maximum, and a byte per row: 1 if the maximum is in [-bound, bound].

        `logits` is float32 `[rows, vocabulary]`. NaN counts as larger than all numbers.
        """
        if logits.shape != self._shape or logits.stride() != self._strides or logits.dtype != torch.float32:
            self._fit(logits)
        self._arguments.logits = logits.data_ptr()
        self._call(self._reference)
        return self._tokens.tolist(), self._are_bounded.tobytes()

    def _fit(self, logits: torch.Tensor) -> None:
        """Allocates buffers for logits of a new shape; most calls have the shape of the previous call."""
        if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1 or not logits.shape[1]:
            raise ValueError(f"logits must be dense rows of float32, not {logits.dtype} {list(logits.shape)}")
        rows, vocabulary = logits.shape
        arguments = self._arguments
        self._tokens, self._are_bounded = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.bool_)
        arguments.tokens, arguments.are_bounded = self._tokens.ctypes.data, self._are_bounded.ctypes.data
        arguments.stride, arguments.rows, arguments.vocabulary = logits.stride(0), rows, vocabulary
        self._call = self._choose_at_once if rows * vocabulary <= AT_ONCE_MAX else self._choose
        self._shape, self._strides = logits.shape, logits.stride()


def draw(library: Library, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws a token for each row, int64 `[rows]`.

    The result is the first token whose cumulative probability in softmax(logits / temperature) exceeds the row's
    uniform number. With temperature 0 it is the greedy choice. A row without a finite maximum gives an arbitrary token.

    Args:
        library: the kernels.
        logits: float32 `[rows, vocabulary]`.
        temperatures: float32 `[rows]`.
        uniforms: float64 `[rows]`, in [0, 1).
    """
    rows = logits.shape[0]
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be dense rows of float32, not {logits.dtype} {list(logits.shape)}")
    for numbers, dtype in ((temperatures, torch.float32), (uniforms, torch.float64)):
        if numbers.shape != (rows,) or numbers.dtype != dtype or not numbers.is_contiguous():
            raise ValueError(f"numbers must be {dtype} [{rows}], not {list(numbers.shape)}")
    tokens = torch.empty(rows, dtype=torch.int64)
    arguments = Draw(
        logits.data_ptr(), temperatures.data_ptr(), uniforms.data_ptr(), tokens.data_ptr(), logits.stride(0), rows,
        logits.shape[1],
    )  # fmt: skip
    library.functions.quire_draw(byref(arguments))
    return tokens


class PackedLinear:
    """The weights of one linear layer, or of several with the same input, packed as `csrc/linear.h` reads them.

    Weights are packed once. The original tensors are not kept.
    """

    def __init__(
        self,
        library: Library,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] | None = None,
        *,
        gate: str | None = None,
    ) -> None:
        """Packs the weights.

        Args:
            library: the kernels.
            weights: each `[outputs, inputs]`; their outputs are concatenated. A gated layer has two: gate and up.
            biases: one per weight, each `[outputs]` or None.
            gate: a key of GATES. The layer then returns activation(gate) * up, with the `outputs` of one weight.

        Raises:
            ValueError: shapes or dtypes do not fit together, or `inputs` is odd in bfloat16.
        """
        first = weights[0]
        self.inputs = first.shape[1]
        if any(w.shape[1] != self.inputs or w.dtype != first.dtype or w.stride(1) != 1 for w in weights):
            raise ValueError("weights that are packed together must have the same number of inputs and the same dtype")
        if self.inputs * first.itemsize % 4:
            raise ValueError(f"{self.inputs} inputs of {first.dtype} do not fill 32-bit words")
        is_gated = gate is not None
        if is_gated and (len(weights) != 2 or weights[0].shape != weights[1].shape):
            raise ValueError("a gated layer must have two weights of the same shape")
        self.library = library
        self.dtype = first.dtype
        self.gate = gate
        self.outputs = first.shape[0] if is_gated else sum(weight.shape[0] for weight in weights)
        columns = PANEL // 2 if is_gated else PANEL
        panels = -(-self.outputs // columns)
        words = self.inputs * first.itemsize // 4
        self.weight = torch.zeros(panels, words, PANEL, dtype=torch.float32)  # a word holds one float32 or two bfloat16
        bias = torch.zeros(panels, PANEL)
        first_row = 0
        for number, weight in enumerate(weights):
            offset = columns * number if is_gated else 0
            start = 0 if is_gated else first_row
            arguments = Pack(
                weight.data_ptr(), self.weight.data_ptr(), weight.stride(0), weight.shape[0], self.inputs, start,
                offset, columns, _dtype(weight),
            )  # fmt: skip
            library.functions.quire_pack(byref(arguments))
            added = biases[number] if biases else None
            if added is not None:
                row = torch.arange(start, start + weight.shape[0])
                bias[row // columns, offset + row % columns] = added.float()
            first_row += weight.shape[0]
        self.bias = bias if biases and any(each is not None for each in biases) else None

    def ungated(self) -> PackedLinear:
        """Returns a layer that shares a gated layer's weights, and returns gates and values without multiplying them.

        The results are `[..., panels, 2, PANEL / 2]`: index 0 has the gates, index 1 the values.
        """
        other = copy(self)
        other.gate, other.outputs = None, self.weight.shape[0] * PANEL
        return other

    def gated_by(self, gate: str) -> PackedLinear:
        """Returns a gated layer that shares these weights, with another activation."""
        other = copy(self)
        other.gate = gate
        return other

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Computes x @ weight^T + bias, plus `residual` if there is one.

        Args:
            x: `[..., inputs]` of the weights' dtype.
            residual: `[..., outputs]`, contiguous, of the same dtype.

        Returns:
            `[..., outputs]`.
        """
        rows = _rows(x)
        if rows.shape[1] != self.inputs or x.dtype != self.dtype:
            raise ValueError(f"the input must be {self.dtype} [..., {self.inputs}], not {x.dtype} {list(x.shape)}")
        if rows.stride(0) * x.itemsize % 4:
            rows = rows.contiguous()
        output = torch.empty((*x.shape[:-1], self.outputs), dtype=x.dtype)
        if residual is not None and (residual.shape != output.shape or not residual.is_contiguous()):
            raise ValueError(f"the residual must be contiguous {list(output.shape)}, not {list(residual.shape)}")
        arguments = Linear(
            rows.data_ptr(), self.weight.data_ptr(), 0 if self.bias is None else self.bias.data_ptr(),
            0 if residual is None else residual.data_ptr(), output.data_ptr(), rows.stride(0), self.outputs,
            self.outputs, rows.shape[0], self.inputs, self.outputs, GATES[self.gate], _dtype(x),
        )  # fmt: skip
        self.library.functions.quire_linear(byref(arguments))
        return output


def embed(library: Library, ids: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """Looks up rows of a packed weight, as an embedding does.

    Args:
        library: the kernels.
        ids: int64 `[...]`, contiguous.
        packed: one weight, not gated.

    Returns:
        `[..., inputs]` of the weight's dtype.

    Raises:
        IndexError: an id is negative, or not below the weight's `outputs`.
    """
    if ids.dtype != torch.int64 or not ids.is_contiguous() or packed.gate is not None:
        raise ValueError(f"ids must be contiguous int64, not {ids.dtype} with strides {ids.stride()}")
    if ids.numel():
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= packed.outputs:
            raise IndexError(f"ids must be in 0..{packed.outputs - 1}, not {int(low) if int(low) < 0 else int(high)}")
    output = torch.empty((*ids.shape, packed.inputs), dtype=packed.dtype)
    words = packed.weight.shape[1]
    library.functions.quire_embed(
        byref(Embed(ids.data_ptr(), packed.weight.data_ptr(), output.data_ptr(), ids.numel(), words))
    )
    return output


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Reshapes `[..., size]` to `[rows, size]`, dense in the last dimension."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _vector(weight: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    if weight.shape != (size,) or weight.dtype != dtype or not weight.is_contiguous():
        raise ValueError(f"a weight must be contiguous {dtype} [{size}], not {weight.dtype} {list(weight.shape)}")
    return weight


def _dtype(x: torch.Tensor) -> int:
    number = DTYPES.get(x.dtype)
    if number is None or x.device.type != "cpu":
        raise ValueError(f"the kernels accept float32 and bfloat16 on a CPU, not {x.dtype} on {x.device}")
    return number
