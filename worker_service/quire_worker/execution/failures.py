"""Failures of single requests inside the worker, and the errors that their callers get."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

import torch
from quire.errors import Reason


class FailureKind(enum.Enum):
    """Cause of a request's failure. The result is the label of a metric, so it has few values."""

    NOT_FINITE = "not_finite"  # the request's logits hold NaN or infinity
    OUT_OF_MEMORY = "out_of_memory"  # the request did not fit into memory even alone
    EXCEPTION = "exception"  # the forward pass raised any other exception
    NO_TOKEN_LEFT = "no_token_left"  # the request's parameters rule out the whole vocabulary
    GRAMMAR = "grammar"  # the grammar became too complex
    TOKENIZER = "tokenizer"  # encoding the prompt or decoding the output failed


class Failure(NamedTuple):
    """The reason why a request ends. Holds no exception: a traceback would keep the tensors of a failed pass alive."""

    kind: FailureKind
    reason: Reason
    message: str


class DeviceLostError(Exception):
    """The device no longer answers any call. Only a new process can use it again."""


NOT_FINITE = Failure(
    FailureKind.NOT_FINITE, Reason.MODEL_FAILED, "the model's logits for this request contain NaN or infinity"
)
NO_TOKEN_LEFT = Failure(
    FailureKind.NO_TOKEN_LEFT,
    Reason.BAD_PARAMETER,
    "no token can be sampled: allowed_token_ids, banned_token_ids, min_tokens and the structure together exclude all",
)
GRAMMAR = Failure(
    FailureKind.GRAMMAR, Reason.BAD_PARAMETER, "the structure became too complex to follow: use a simpler one"
)
TOKENIZER = Failure(FailureKind.TOKENIZER, Reason.TOKENIZER_FAILED, "the tokenizer failed on this request")

# torch has an exception class only for the memory of accelerators. Errors of other allocators (torch's for CPUs, C++'s
# and those inside libraries) are recognized by their messages.
_SAYS_NO_MEMORY = re.compile(r"DefaultCPUAllocator|std::bad_alloc|out of memory|ALLOC_FAILED", re.IGNORECASE)


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory ran out, so that a smaller batch could succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS_NO_MEMORY.search(str(error)) is not None


def failure_of(error: Exception) -> Failure:
    """Returns the failure of a request that was alone in a forward pass that raised.

    The message names the exception's type and not its text, because that could hold anything.
    """
    if is_out_of_memory(error):
        message = "the worker has too little memory for this request, even alone"
        return Failure(FailureKind.OUT_OF_MEMORY, Reason.OUT_OF_MEMORY, message)
    message = f"forward pass failed: {type(error).__name__}"
    return Failure(FailureKind.EXCEPTION, Reason.MODEL_FAILED, message)
