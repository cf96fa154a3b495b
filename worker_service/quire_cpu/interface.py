"""The structures of `csrc/quire_cpu.h`, field by field; the header explains them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
GATES = {None: 0, "silu": 1, "gelu_tanh": 2}  # activations of gated layers
PANEL = 64  # columns per panel of a packed weight


class Attend(ctypes.Structure):
    """Holds the arguments of `quire_attend`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("query_indptr", "kv_lengths", "block_tables")],
        *[(name, c_int64) for name in ("table_stride", "sequences")],
        ("query", c_void_p),
        *[(name, c_int64) for name in ("query_token_stride", "query_head_stride")],
        ("pages", c_void_p),
        ("page_stride", c_int64),
        ("output", c_void_p),
        *[(name, c_int32) for name in ("query_heads", "kv_heads", "head_dim", "page_size", "window_left", "dtype")],
        *[(name, c_float) for name in ("scale", "soft_cap")],
        ("sinks", c_void_p),
    ]


class Append(ctypes.Structure):
    """Holds the arguments of `quire_append`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("key", "value")],
        *[
            (name, c_int64)
            for name in ("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride")
        ],
        *[(name, c_void_p) for name in ("slots", "pages")],
        *[(name, c_int64) for name in ("page_stride", "tokens")],
        *[(name, c_int32) for name in ("kv_heads", "head_dim", "page_size", "dtype")],
    ]


class Rotate(ctypes.Structure):
    """Holds the arguments of `quire_rotate`."""

    _fields_ = [
        ("heads", c_void_p),
        ("token_stride", c_int64),
        *[(name, c_void_p) for name in ("cosine", "sine")],
        ("table_stride", c_int64),
        *[(name, c_void_p) for name in ("positions", "query_norm", "key_norm")],
        ("tokens", c_int64),
        *[(name, c_int32) for name in ("query_heads", "kv_heads", "head_dim", "rotary_dim", "dtype")],
        ("epsilon", c_float),
    ]


class Norm(ctypes.Structure):
    """Holds the arguments of `quire_norm`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("input", "output", "weight")],
        *[(name, c_int64) for name in ("input_stride", "output_stride", "rows", "size")],
        ("dtype", c_int32),
        ("epsilon", c_float),
    ]


class Linear(ctypes.Structure):
    """Holds the arguments of `quire_linear`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("input", "weight", "bias", "residual", "output")],
        *[
            (name, c_int64)
            for name in ("input_stride", "residual_stride", "output_stride", "rows", "inputs", "outputs")
        ],
        *[(name, c_int32) for name in ("gate", "dtype")],
    ]


class Pack(ctypes.Structure):
    """Holds the arguments of `quire_pack`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("weight", "packed")],
        *[(name, c_int64) for name in ("weight_stride", "rows", "inputs", "first", "offset", "columns")],
        ("dtype", c_int32),
    ]


class Embed(ctypes.Structure):
    """Holds the arguments of `quire_embed`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("ids", "packed", "output")],
        *[(name, c_int64) for name in ("tokens", "words")],
    ]


class Convolve(ctypes.Structure):
    """Holds the arguments of `quire_convolve`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("input", "weight", "bias", "states", "output", "starts")],
        *[(name, c_int64) for name in ("input_stride", "sequences", "channels", "kernel")],
        *[(name, c_int32) for name in ("gate", "dtype")],
    ]


class Scan(ctypes.Structure):
    """Holds the arguments of `quire_scan`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("input", "b", "c", "steps", "decay", "skip", "states", "output", "starts")],
        *[(name, c_int64) for name in ("input_stride", "b_stride", "c_stride", "sequences")],
        *[(name, c_int32) for name in ("heads", "head_dim", "groups", "state_size", "dtype")],
    ]


class Draw(ctypes.Structure):
    """Holds the arguments of `quire_draw`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("logits", "temperatures", "uniforms", "tokens")],
        *[(name, c_int64) for name in ("stride", "rows", "vocabulary")],
    ]


class Packed(ctypes.Structure):
    """Describes a packed weight (`QuirePacked`)."""

    _fields_ = [
        *[(name, c_void_p) for name in ("weight", "bias")],
        *[(name, c_int64) for name in ("inputs", "outputs")],
        ("gate", c_int32),
    ]


class Layer(ctypes.Structure):
    """Describes one layer of a decoder (`QuireLayer`)."""

    _fields_ = [
        *[(name, Packed) for name in ("qkv", "output", "gate_up", "down")],
        *[(name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm", "pages")],
        ("page_stride", c_int64),
        ("attend", ctypes.POINTER(Attend)),
        *[(name, c_void_p) for name in ("slots", "sinks")],
        *[(name, c_float) for name in ("attention_epsilon", "mlp_epsilon", "head_epsilon")],
    ]


class Decoder(ctypes.Structure):
    """Holds the arguments of `quire_decoder`."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        ("layer_count", c_int64),
        *[(name, c_void_p) for name in ("hidden", "normed", "qkv", "attended", "gated")],
        *[(name, c_void_p) for name in ("cosine", "sine", "positions", "kept")],
        *[(name, c_int64) for name in ("table_stride", "tokens", "kept_count", "hidden_size")],
        *[(name, c_int32) for name in ("query_heads", "kv_heads", "head_dim", "rotary_dim", "dtype")],
    ]


class Greedy(ctypes.Structure):
    """Holds the arguments of `quire_greedy`."""

    _fields_ = [
        *[(name, c_void_p) for name in ("logits", "tokens", "are_bounded")],
        *[(name, c_int64) for name in ("stride", "rows", "vocabulary")],
        ("bound", c_float),
    ]


CALLS = {
    "quire_attend": Attend,
    "quire_append": Append,
    "quire_rotate": Rotate,
    "quire_norm": Norm,
    "quire_linear": Linear,
    "quire_pack": Pack,
    "quire_embed": Embed,
    "quire_convolve": Convolve,
    "quire_scan": Scan,
    "quire_decoder": Decoder,
    "quire_draw": Draw,
    "quire_greedy": Greedy,
}


def declare(functions: ctypes.CDLL) -> None:
    """Declares the library's functions to ctypes."""
    for name, structure in CALLS.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = [ctypes.POINTER(structure)], None
    functions.quire_threads.argtypes, functions.quire_threads.restype = [c_void_p, ctypes.c_int], None
    functions.quire_use.argtypes, functions.quire_use.restype = [ctypes.c_char_p], ctypes.c_int
    functions.quire_instruction_sets.argtypes, functions.quire_instruction_sets.restype = [], ctypes.c_char_p
