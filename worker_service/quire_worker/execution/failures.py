"""Failures of single requests inside the worker, and the errors that their callers get."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

import torch
from quire.errors import Reason


class FailureKind(enum.Enum):
    """Cause of a request's failure. It is the label of a metric, so there are few values."""

    NOT_FINITE = "not_finite"  # its logits hold NaN or infinity
    OUT_OF_MEMORY = "out_of_memory"  # even by itself
    EXCEPTION = "exception"  # anything else that the forward pass raises
    NO_TOKEN_LEFT = "no_token_left"  # its own parameters rule out the whole vocabulary
    GRAMMAR = "grammar"  # it became too complex
    TOKENIZER = "tokenizer"  # on the way in, or out


class Failure(NamedTuple):
    """Why a request ends. Holds no exception: its traceback would keep the tensors of a failed pass alive."""

    kind: FailureKind
    reason: Reason
    message: str


class DeviceLostError(Exception):
    """The device answers nothing any more, whatever is asked of it; only a new process gets it back."""


NOT_FINITE = Failure(
    FailureKind.NOT_FINITE, Reason.MODEL_FAILED, "the model's logits for this request hold NaN or infinity"
)
NO_TOKEN_LEFT = Failure(
    FailureKind.NO_TOKEN_LEFT,
    Reason.BAD_PARAMETER,
    "no token is left to choose from: allowed_token_ids, banned_token_ids, min_tokens and the structure exclude all",
)
GRAMMAR = Failure(
    FailureKind.GRAMMAR, Reason.BAD_PARAMETER, "the structure that was asked for is too complex to be followed further"
)
TOKENIZER = Failure(FailureKind.TOKENIZER, Reason.TOKENIZER_FAILED, "the tokenizer failed on this request")

# torch has a class of its own only for the memory of accelerators. The rest is known by what its allocators say:
# the CPU's, C++'s, and those of the libraries that allocate by themselves.
_SAYS_NO_MEMORY = re.compile(r"DefaultCPUAllocator|std::bad_alloc|out of memory|ALLOC_FAILED", re.IGNORECASE)


def is_out_of_memory(error: Exception) -> bool:
    """Tells whether less at a time could help."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS_NO_MEMORY.search(str(error)) is not None


def failure_of(error: Exception) -> Failure:
    """Returns what an exception of the forward pass means for a request that was alone in it. Names its type, not its
    text: nobody knows what that holds."""
    if is_out_of_memory(error):
        message = "the worker has no memory left to compute this request, not even by itself"
        return Failure(FailureKind.OUT_OF_MEMORY, Reason.OUT_OF_MEMORY, message)
    message = f"forward pass failed: {type(error).__name__}"
    return Failure(FailureKind.EXCEPTION, Reason.MODEL_FAILED, message)
