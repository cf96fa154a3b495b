"""Logprobs that wait for the caller are packed, and split into messages."""

from __future__ import annotations

import pytest
from quire.errors import QuireError, Reason
from quire_worker.calls.checks import (
    HELD_CHARACTERS_MAX,
    HELD_LOGPROB_VALUES_MAX,
    PROMPT_LOGPROB_VALUES_MAX,
    check_echo,
    check_logprobs,
)
from quire_worker.calls.generate_messages import PIECE_VALUES_MAX, pieces_of
from quire_worker.sampling.logprobs import TokenLogprobs
from quire_worker.sampling.packed_logprobs import PackedLogprobs
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.output import Delivery, FinishReason

from tests.worker.engine_harness import unpacked


def told(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(number, -0.5 * number, (number, number + 1), (-0.25, -8.0)) for number in range(count)]


def test_what_is_put_again_takes_the_place_of_the_first() -> None:
    packed = PackedLogprobs()
    packed.put(0, told(8))
    packed.put(4, told(9)[4:])
    assert unpacked(packed) == tuple(told(9))
    assert packed.value_count == 27


def test_a_long_delivery_comes_in_pieces_that_are_the_same_together() -> None:
    count = PIECE_VALUES_MAX
    packed = PackedLogprobs()
    packed.put(0, told(count))
    whole = Delivery(1, tuple(range(count)), "text", FinishReason.LENGTH, is_last=True, logprobs=packed)
    pieces = list(pieces_of(whole))
    assert len(pieces) == 4
    assert all(piece.logprobs is not None and piece.logprobs.value_count <= PIECE_VALUES_MAX for piece in pieces)
    assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids
    assert sum((unpacked(piece.logprobs) for piece in pieces), ()) == unpacked(packed)
    assert [piece.text for piece in pieces] == ["text", "", "", ""]
    assert [piece.is_last for piece in pieces] == [False, False, False, True]
    assert [piece.finish_reason for piece in pieces] == [None, None, None, FinishReason.LENGTH]


def test_logprobs_of_a_prompt_that_fit_no_message_are_refused_by_name() -> None:
    most = PROMPT_LOGPROB_VALUES_MAX // 21
    check_logprobs(SamplingParams(prompt_logprobs=20), most, 1 << 20)
    check_logprobs(SamplingParams(), 100 * most, 1 << 24)
    with pytest.raises(QuireError, match="prompt_logprobs would have 262,164 values") as refused:
        check_logprobs(SamplingParams(prompt_logprobs=20), most + 1, 1 << 20)
    assert refused.value.reason is Reason.BAD_PARAMETER
    assert refused.value.field == "prompt_logprobs"


def test_samples_that_are_held_to_their_end_have_a_limit_of_logprobs_that_names_the_numbers() -> None:
    most = HELD_LOGPROB_VALUES_MAX // 64 // 21
    best = SamplingParams(best_of=64, logprobs=20, max_tokens=1 << 30)
    check_logprobs(best, 10, 10 + most)
    # Without `best_of`, logprobs are sent as they are computed, so there is no limit.
    check_logprobs(SamplingParams(n=64, logprobs=20, max_tokens=1 << 30), 10, 1 << 20)
    what = r"best_of: 64 samples of 1,561 tokens with 21 logprobs each have 2,097,984 values, .* at most 2,097,152"
    with pytest.raises(QuireError, match=what) as refused:
        check_logprobs(best, 10, 11 + most)
    assert (refused.value.reason, refused.value.field) == (Reason.BAD_PARAMETER, "best_of")


def test_samples_that_all_begin_with_a_long_text_have_a_limit_that_names_the_numbers() -> None:
    text = "a" * (HELD_CHARACTERS_MAX // 64)
    check_echo(SamplingParams(n=64), text)
    what = r"echo of 262,145 characters in 64 samples makes 16,777,280, .* at most 16,777,216"
    with pytest.raises(QuireError, match=what) as refused:
        check_echo(SamplingParams(n=64), text + "a")
    assert (refused.value.reason, refused.value.field) == (Reason.BAD_PARAMETER, "echo")
