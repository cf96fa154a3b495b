"""Sampling: temperature, top-k, top-p, min-p and the draw in one kernel, without sorting the vocabulary.

    x_i = logit_i * (1 / temperature)
    kept:  fewer than top_k tokens are above x_i
           the tokens above x_i, of those that top_k keeps, have together less than top_p of their probability
           e^(x_i - max x) >= min_p
    token: the first in the order of the vocabulary whose cumulative kept probability exceeds `uniform` * the whole

So tokens with equal logits are kept or dropped together, and the likeliest token always stays. A draw uses one uniform
number, so its result does not depend on the machine or on the rest of the batch, up to the rounding of sums.
Temperature 0 is greedy: the likeliest token, or the first of several equal ones.

Both top-k and top-p ask for the lowest value v for which the tokens above v weigh less than a limit. A token weighs 1
for top-k, and e^(x - max x) for top-p. The kernel finds v bit by bit. Floats sort like their bits as integers once the
sign bit is handled, so this is a search among 2^32 numbers, three bits per pass over the row:

    v = the largest c with weight(x >= c) >= limit

There is one program per row. A row of 151,936 float32 is 0.6 MB, which the L2 cache keeps from pass to pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import device_of
from quire_kernels.shared.numbers import require_finite, require_integer

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BLOCK = 2048  # tokens of the vocabulary that are read at a time
DRAW_BLOCK = 4096  # tokens that are read at a time in the last pass, which computes a sum per block
NUM_WARPS = 16
# For each argument: the lower bound, the upper bound, and for each bound whether the value itself is allowed.
RANGES = {
    "uniform": (0.0, 1.0, True, False),
    "temperature": (1e-3, float("inf"), True, False),  # 0 (greedy) is allowed, too
    "top_k": (0, 2**31 - 1, True, True),
    "top_p": (0.0, 1.0, False, True),
    "min_p": (0.0, 1.0, True, True),
}


@triton.jit
def _ordered(x):
    """Maps fp32 to uint32 with the same order; adding +0.0 makes -0.0 equal to 0.0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits & 0x80000000) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _load_scaled(row_ptr, start, vocabulary, stride, inverse_temperature, BLOCK: tl.constexpr):
    token = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + token.to(tl.int64) * stride, mask=token < vocabulary, other=float("-inf"))
    return logits.to(tl.float32) * inverse_temperature


@triton.jit
def _lowest_kept(
    row_ptr, vocabulary, stride, inverse_temperature, largest, limit, WEIGH: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the largest c that leaves the tokens at or above c a weight of at least `limit`."""
    found = tl.cast(0, tl.uint32)
    digit = tl.arange(0, 8).to(tl.uint32)
    shift = 30
    while shift >= 0:
        bound = found + (digit << shift)
        weights = tl.zeros([BLOCK, 8], tl.float32)  # columns are summed once, at the end of a pass
        for start in range(0, vocabulary, BLOCK):
            x = _load_scaled(row_ptr, start, vocabulary, stride, inverse_temperature, BLOCK)
            key = _ordered(x)
            weight = tl.exp(x - largest) if WEIGH else tl.full([BLOCK], 1.0, tl.float32)
            weight = tl.where(start + tl.arange(0, BLOCK) < vocabulary, weight, 0.0)
            weights += tl.where(key[:, None] >= bound[None, :], weight[:, None], 0.0)
        # The first pass chooses only the top two bits. There, bounds for digits from 4 on overflow and never count.
        reached = (tl.sum(weights, axis=0) >= limit) & (digit > 0) & ((bound >> shift) == (found >> shift) + digit)
        found += tl.sum(reached.to(tl.int32), axis=0).to(tl.uint32) << shift
        shift -= 3
    return found


@triton.jit(
    do_not_specialize=["vocabulary", "row_stride"],
    do_not_specialize_on_alignment=["uniform_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"],
)
def sample_kernel(
    logits_ptr,
    uniform_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    token_ptr,
    vocabulary,
    row_stride,
    stride,
    BLOCK: tl.constexpr,
    DRAW_BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Chooses the token of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.cast(0.0, tl.float32) if GREEDY else tl.load(temperature_ptr + row)
    is_drawn = temperature > 0.0
    inverse_temperature = tl.div_rn(tl.cast(1.0, tl.float32), tl.where(is_drawn, temperature, 1.0))
    # Find the first of the largest logits, and whether there is a NaN.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    nan_count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        x = _load_scaled(row_ptr, start, vocabulary, stride, inverse_temperature, BLOCK)
        nan_count += (x != x).to(tl.int32)
        best_token = tl.where(x > best, start + tl.arange(0, BLOCK), best_token)
        best = tl.where(x > best, x, best)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_token, vocabulary), axis=0)
    is_valid = (tl.sum(nan_count, axis=0) == 0) & (largest > float("-inf")) & (largest < float("inf"))
    if not GREEDY:
        if is_valid & is_drawn:
            lowest = tl.cast(0, tl.uint32)
            top_k = tl.load(top_k_ptr + row)
            if (top_k > 0) & (top_k < vocabulary):
                limit = top_k.to(tl.float32)
                lowest = _lowest_kept(row_ptr, vocabulary, stride, inverse_temperature, largest, limit, False, BLOCK)
            top_p = tl.load(top_p_ptr + row)
            if top_p < 1.0:
                # top_p is a share of the weight of the tokens that top_k keeps. `_lowest_kept` may search all tokens,
                # because every token above the value that it finds is one of these.
                total = _kept_weight(row_ptr, vocabulary, stride, inverse_temperature, largest, lowest, 0.0, BLOCK)
                limit = top_p * total
                by_weight = _lowest_kept(row_ptr, vocabulary, stride, inverse_temperature, largest, limit, True, BLOCK)
                lowest = tl.maximum(lowest, by_weight)
            min_p = tl.load(min_p_ptr + row)
            total = _kept_weight(row_ptr, vocabulary, stride, inverse_temperature, largest, lowest, min_p, BLOCK)
            target = tl.load(uniform_ptr + row) * total
            # fmt: off
            token = _draw(
                row_ptr, vocabulary, stride, inverse_temperature, largest, lowest, min_p, target, token, DRAW_BLOCK
            )
            # fmt: on
    tl.store(token_ptr + row, tl.where(is_valid, token, -1))


@triton.jit
def _weights(row_ptr, start, vocabulary, stride, inverse_temperature, largest, lowest, min_p, BLOCK: tl.constexpr):
    """Computes e^(x - max x) for kept tokens, and 0 for the others."""
    x = _load_scaled(row_ptr, start, vocabulary, stride, inverse_temperature, BLOCK)
    weight = tl.exp(x - largest)
    return tl.where((_ordered(x) >= lowest) & (weight >= min_p), weight, 0.0)


@triton.jit
def _kept_weight(row_ptr, vocabulary, stride, inverse_temperature, largest, lowest, min_p, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        total += _weights(row_ptr, start, vocabulary, stride, inverse_temperature, largest, lowest, min_p, BLOCK)
    return tl.sum(total, axis=0)


@triton.jit
def _draw(
    row_ptr, vocabulary, stride, inverse_temperature, largest, lowest, min_p, target, likeliest, BLOCK: tl.constexpr
):
    """Returns the first token with a cumulative weight above `target`; the last kept one if rounding leaves none."""
    token = likeliest
    before = tl.cast(0.0, tl.float32)
    start = 0
    while start < vocabulary:
        weight = _weights(row_ptr, start, vocabulary, stride, inverse_temperature, largest, lowest, min_p, BLOCK)
        number = tl.arange(0, BLOCK)
        tile_weight = tl.sum(weight, axis=0)
        if tile_weight > 0.0:
            token = start + tl.max(tl.where(weight > 0.0, number, 0), axis=0)
            if before + tile_weight > target:
                exceeds = (before + tl.cumsum(weight, axis=0) > target) & (weight > 0.0)
                first = tl.min(tl.where(exceeds, number, BLOCK), axis=0)
                if first < BLOCK:
                    token = start + first
                    start = vocabulary  # ends the search
        before += tile_weight
        start += BLOCK
    return token


def sample(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor | float = 1.0,
    top_k: torch.Tensor | int = 0,
    top_p: torch.Tensor | float = 1.0,
    min_p: torch.Tensor | float = 0.0,
    *,
    check: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draws one token per row.

    Args:
        logits: fp32, bf16 or fp16 `[batch, vocabulary]`, any strides; -inf is never drawn.
        uniform: fp32 `[batch]`, in [0, 1).
        temperature: a number, or fp32 `[batch]`, at least 1e-3; or 0 for greedy, which ignores all other options.
        top_k: a number, or int32 `[batch]`; 0 keeps all. Tokens with the same logit as the last kept token stay, too.
        top_p: a number, or fp32 `[batch]`, above 0; 1 keeps all. The probability is a share of the tokens that top_k
            keeps.
        min_p: a number, or fp32 `[batch]`, in [0, 1]: the least probability as a share of the likeliest token's.
        check: whether the values of tensors are checked too. The check makes the host wait for the device, so it must
            be False inside a CUDA graph.
        out: int32 `[batch]`, contiguous, written in place; None allocates it.

    Returns:
        `out`, or a new int32 `[batch]`; -1 for a row with NaN, or without a finite largest logit.

    Raises:
        ValueError: a shape, dtype, device or number is not as described; the message names the argument.
    """
    _check_logits(logits)
    given = {"uniform": uniform, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    vectors = {}
    for name, value in given.items():
        _check_range(name, value, read=check)
        vectors[name] = _vector(name, value, torch.int32 if name == "top_k" else torch.float32, logits)
    if out is not None and not _vector("out", out, torch.int32, logits).is_set_to(out):
        raise ValueError("out must be contiguous")
    return _launch(logits, vectors, out)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Returns the likeliest token of each row, or the first of several equal ones.

    Args:
        logits: fp32, bf16 or fp16 `[batch, vocabulary]`, any strides.

    Returns:
        int32 `[batch]`; -1 for a row with NaN, or without a finite largest logit.

    Raises:
        ValueError: `logits` is not as described.
    """
    _check_logits(logits)
    return _launch(logits, None, None)


def weights_reference(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Returns the probabilities that `sample` uses for a row, computed by sorting in plain torch.

    Args:
        logits: floating `[vocabulary]`.
        temperature: above 0.
        top_k: see `sample`.
        top_p: see `sample`.
        min_p: see `sample`.

    Returns:
        float64 `[vocabulary]`, with sum 1; 0 for tokens that are not kept.
    """
    x = logits.to(torch.float32) * (1 / torch.tensor(temperature, dtype=torch.float32, device=logits.device))
    if 0 < top_k < x.numel():
        x = x.masked_fill(x < x.topk(top_k).values[-1], float("-inf"))
    if top_p < 1:
        descending, order = x.to(torch.float64).sort(descending=True)
        probability = descending.softmax(0)
        above = probability.cumsum(0) - probability
        first_of_equals = torch.searchsorted(-descending, -descending)
        x[order[above[first_of_equals] >= top_p]] = float("-inf")
    weight = torch.exp(x.to(torch.float64) - x.max())
    weight[weight < min_p] = 0
    return weight / weight.sum()


def _launch(logits: torch.Tensor, vectors: dict[str, torch.Tensor] | None, out: torch.Tensor | None) -> torch.Tensor:
    batch, vocabulary = logits.shape
    token = torch.empty(batch, dtype=torch.int32, device=logits.device) if out is None else out
    if batch == 0:
        return token
    with device_of(sample_kernel, logits=logits):
        sample_kernel[(batch,)](
            logits,
            *(vectors.values() if vectors else (None,) * 5),
            token,
            vocabulary,
            *logits.stride(),
            BLOCK=BLOCK,
            DRAW_BLOCK=DRAW_BLOCK,
            GREEDY=vectors is None,
            num_warps=NUM_WARPS,
        )
    return token


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.dtype not in DTYPES:
        raise ValueError(f"logits must be floating [batch, vocabulary], not {logits.dtype} {tuple(logits.shape)}")


def _check_range(name: str, value: torch.Tensor | float, *, read: bool) -> None:
    if isinstance(value, torch.Tensor):
        if not read or value.numel() == 0:
            return
        numbers = [float(number) for number in value.unique()]
    else:
        numbers = [require_integer(name, value, 0) if name == "top_k" else require_finite(name, value)]
    if name == "temperature":
        numbers = [number for number in numbers if number != 0]
    low, high, low_is_in, high_is_in = RANGES[name]
    for number in numbers:
        if not (low < number < high or (low_is_in and number == low) or (high_is_in and number == high)):
            bounds = f"{'[' if low_is_in else '('}{low}, {high}{']' if high_is_in else ')'}"
            raise ValueError(f"{name} must be in {bounds}, not {number}")


def _vector(name: str, value: torch.Tensor | float, dtype: torch.dtype, logits: torch.Tensor) -> torch.Tensor:
    """Expands an option to one value per row, `[batch]`."""
    shape = logits.shape[:1]
    if not isinstance(value, torch.Tensor):
        return torch.full(shape, value, dtype=dtype, device=logits.device)
    if value.dtype != dtype or value.shape != shape or value.device != logits.device:
        raise ValueError(
            f"{name} must be {dtype} {tuple(shape)} on {logits.device}, "
            f"not {value.dtype} {tuple(value.shape)} on {value.device}"
        )
    return value.contiguous()
