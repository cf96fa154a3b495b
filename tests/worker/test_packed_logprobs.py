"""Logprobs that wait for their caller: packed, and cut into messages."""

from __future__ import annotations

import pytest
from quire.errors import QuireError, Reason
from quire_worker.calls.checks import PROMPT_LOGPROB_VALUES_MAX, check_prompt_logprobs
from quire_worker.calls.generate_messages import PIECE_VALUES_MAX, pieces_of
from quire_worker.sampling.logprobs import TokenLogprobs
from quire_worker.sampling.packed_logprobs import PackedLogprobs
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.request import Delivery, FinishReason

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
    check_prompt_logprobs(SamplingParams(prompt_logprobs=20), most)
    check_prompt_logprobs(SamplingParams(), 100 * most)
    with pytest.raises(QuireError, match="prompt_logprobs would be 262,164 values") as refused:
        check_prompt_logprobs(SamplingParams(prompt_logprobs=20), most + 1)
    assert refused.value.reason is Reason.BAD_PARAMETER
    assert refused.value.field == "prompt_logprobs"
