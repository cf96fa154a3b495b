"""The kernels that need no pages, called with tensors: on a CPU, float32 or bfloat16, dense in the last dimension.

Each call makes one structure of pointers, sizes and strides. Arguments that do not fit raise ValueError here, since the
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

AT_ONCE_MAX = 1 << 20  # logits that are looked at without letting go of the interpreter: 50 us or so


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
    """RMSNorm of each query head and of each key head before they are turned, as Qwen3 has it."""

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
    """Turns queries and keys by their positions, in place: x * cos + rotate_half(x) * sin (Su et al., 2021).

    Args:
        library: the kernels.
        heads: `[tokens, query_heads + kv_heads, head_dim]`, dense in its last two dimensions.
        cosine: `[tokens, rotary_dim]` of heads' dtype, whose second half repeats the first; dims of a head beyond
            `rotary_dim` are not rotated.
        sine: the same.
        query_heads: of `heads`, the first ones.
        norms: of the heads, before.
    """
    tokens, head_count, head_dim = heads.shape
    if heads.stride()[1:] != (head_dim, 1):
        raise ValueError(f"heads must lie side by side, not with strides {heads.stride()}")
    if cosine.shape != sine.shape or cosine.shape[0] != tokens or cosine.stride() != sine.stride():
        raise ValueError(f"cosine and sine must be [{tokens}, rotary_dim], not {list(cosine.shape)}")
    rotary_dim = cosine.shape[1]
    if rotary_dim > head_dim or rotary_dim % 2 or cosine.stride(1) != 1 or cosine.dtype != heads.dtype:
        raise ValueError(f"a table of {cosine.dtype} {list(cosine.shape)} does not turn heads of {head_dim}")
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
    """The greedy choice of rows of logits, and which rows have any; keeps its memory from call to call, so that two
    calls may not run at once.

    A thread that lets go of the interpreter gets it back when another one is done with it. A call that takes less than
    that, which is most, keeps it.
    """

    def __init__(self, library: Library, bound: float) -> None:
        """Takes the kernels, and how large a largest logit may be."""
        self._choose = library.functions.quire_greedy
        self._call: Callable[..., None] = self._choose
        self._choose_at_once = PYFUNCTYPE(None, POINTER(Greedy))(("quire_greedy", library.functions))
        self._arguments = Greedy(bound=bound)
        self._reference = byref(self._arguments)
        self._tokens, self._are_bounded = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
        self._shape: tuple[int, ...] = ()
        self._strides: tuple[int, ...] = ()

    def __call__(self, logits: torch.Tensor) -> tuple[list[int], bytes]:
        """Returns the place of the first largest of each row of float32 `[rows, vocabulary]`, and for each 1 if that is
        a number from -bound to bound, else 0; a NaN is larger than all numbers."""
        if logits.shape != self._shape or logits.stride() != self._strides or logits.dtype != torch.float32:
            self._fit(logits)
        self._arguments.logits = logits.data_ptr()
        self._call(self._reference)
        return self._tokens.tolist(), self._are_bounded.tobytes()

    def _fit(self, logits: torch.Tensor) -> None:
        """Gets ready for logits of a shape; most are of that of the call before."""
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
    """Returns a token for each row, int64 `[rows]`: the first token whose cumulative probability in the softmax of
    logits / temperature exceeds the row's number; the greedy choice where the temperature is 0. A row without a largest
    number gives some token.

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
            raise ValueError(f"a number of {dtype} is needed for each of {rows} rows, not {list(numbers.shape)}")
    tokens = torch.empty(rows, dtype=torch.int64)
    arguments = Draw(
        logits.data_ptr(), temperatures.data_ptr(), uniforms.data_ptr(), tokens.data_ptr(), logits.stride(0), rows,
        logits.shape[1],
    )  # fmt: skip
    library.functions.quire_draw(byref(arguments))
    return tokens


class PackedLinear:
    """The weights of one linear layer, or of several with one input, as `csrc/linear.h` reads them.

    Packed once; the tensors that they were packed from are not held.
    """

    def __init__(
        self,
        library: Library,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] | None = None,
        *,
        gate: str | None = None,
    ) -> None:
        """Packs weights.

        Args:
            library: the kernels.
            weights: each `[outputs, inputs]`; their outputs follow one another. If gated, two: of gate and of up.
            biases: as many, each `[outputs]` or None.
            gate: of GATES; the result is this activation of the first, times the second, `[outputs]` of one of both.

        Raises:
            ValueError: they do not fit together, or in bfloat16 `inputs` is odd.
        """
        first = weights[0]
        self.inputs = first.shape[1]
        if any(w.shape[1] != self.inputs or w.dtype != first.dtype or w.stride(1) != 1 for w in weights):
            raise ValueError("weights that are packed together have one input and one dtype")
        if self.inputs * first.itemsize % 4:
            raise ValueError(f"{self.inputs} inputs of {first.dtype} are no whole number of 32-bit words")
        is_gated = gate is not None
        if is_gated and (len(weights) != 2 or weights[0].shape != weights[1].shape):
            raise ValueError("a gated layer has two weights of one shape")
        self.library = library
        self.dtype = first.dtype
        self.gate = gate
        self.outputs = first.shape[0] if is_gated else sum(weight.shape[0] for weight in weights)
        columns = PANEL // 2 if is_gated else PANEL
        panels = -(-self.outputs // columns)
        words = self.inputs * first.itemsize // 4
        self.weight = torch.zeros(panels, words, PANEL, dtype=torch.float32)  # of words, whatever they hold
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
        """Returns a gated layer's weights, the same memory, as a layer that gives gates and values by themselves.

        These are `[..., panels, 2, PANEL / 2]`, where 0 is the gates.
        """
        other = copy(self)
        other.gate, other.outputs = None, self.weight.shape[0] * PANEL
        return other

    def gated_by(self, gate: str) -> PackedLinear:
        """Returns a gated layer of the same weights, which are not copied, with another activation."""
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
            raise ValueError(f"{x.dtype} {list(x.shape)} is no input of a layer of {self.dtype} {self.inputs}")
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
    """Returns rows of a weight where it is packed.

    Args:
        library: the kernels.
        ids: int64 `[...]`, contiguous.
        packed: a weight by itself, not gated.

    Returns:
        `[..., inputs]` of the weight's dtype.

    Raises:
        IndexError: an id is negative, or not below the weight's `outputs`, as torch says it.
    """
    if ids.dtype != torch.int64 or not ids.is_contiguous() or packed.gate is not None:
        raise ValueError(f"ids must be contiguous int64, not {ids.dtype} with strides {ids.stride()}")
    if ids.numel():
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= packed.outputs:
            raise IndexError(f"ids must be in 0..{packed.outputs - 1}, found {int(low) if int(low) < 0 else int(high)}")
    output = torch.empty((*ids.shape, packed.inputs), dtype=packed.dtype)
    words = packed.weight.shape[1]
    library.functions.quire_embed(
        byref(Embed(ids.data_ptr(), packed.weight.data_ptr(), output.data_ptr(), ids.numel(), words))
    )
    return output


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns `[..., size]` as `[rows, size]`, dense in its last dimension."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _vector(weight: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    if weight.shape != (size,) or weight.dtype != dtype or not weight.is_contiguous():
        raise ValueError(f"a weight must be contiguous {dtype} [{size}], not {weight.dtype} {list(weight.shape)}")
    return weight


def _dtype(x: torch.Tensor) -> int:
    number = DTYPES.get(x.dtype)
    if number is None or x.device.type != "cpu":
        raise ValueError(f"the kernels take float32 and bfloat16 on a CPU, not {x.dtype} on {x.device}")
    return number
