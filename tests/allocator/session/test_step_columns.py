"""A step has at most as many bytes as its columns say. If they said less, a step beyond the limit would be accepted."""

from __future__ import annotations

import random

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.core.refusal import Refusal
from quire_allocator.wire.step_checks import check_step
from quire_allocator.wire.step_columns import StepColumns

from tests.allocator.core.pools import make_pool

WIDEST = "\N{GRINNING FACE}"  # a character of 4 bytes in UTF-8, the most possible
DIGEST_BYTES = 32


def fill(message: Message, dice: random.Random, row_count: int, name_lengths: range = range(65)) -> None:
    """Sets every field, at random lengths: columns of `row_count` entries, names of the widest characters."""
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(message, field.name)
            for each in [inner.add() for _ in range(row_count)] if field.is_repeated else [inner]:
                fill(each, dice, row_count, name_lengths)
        elif field.type == FieldDescriptor.TYPE_STRING:
            name = WIDEST * dice.choice(name_lengths)
            if field.is_repeated:
                getattr(message, field.name).extend([name] * row_count)
            else:
                setattr(message, field.name, name)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            entry = {"session_id": 16, "digests": DIGEST_BYTES * dice.randrange(9)}.get(field.name)
            width = 8 if field.name in ("sequences", "parents", "children") else 4
            setattr(message, field.name, bytes(width * row_count if entry is None else entry))
        else:
            bits = 64 if field.type == FieldDescriptor.TYPE_UINT64 else 32
            setattr(message, field.name, (1 << bits) - 1)


@pytest.mark.parametrize("seed", range(20))
def test_no_step_is_longer_than_its_columns_say(seed: int) -> None:
    dice = random.Random(seed)
    step = packed.Step()
    fill(step, dice, dice.randrange(65))
    assert step.ByteSize() <= StepColumns(step).size_max


@pytest.mark.parametrize("phase", ["commits", "frees", "drops", "forks", "grows"])
def test_no_phase_is_longer_than_its_columns_say(phase: str) -> None:
    dice = random.Random(phase)
    whole, step = packed.Step(), packed.Step()
    fill(whole, dice, limits.DROPS_PER_STEP_MAX, range(64, 65))
    if phase == "drops":
        step.drops.extend(whole.drops)
    else:
        getattr(step, phase).CopyFrom(getattr(whole, phase))
    assert step.ByteSize() <= StepColumns(step).size_max


COLUMNS = [
    (phase.name, column.name)
    for phase in packed.Step.DESCRIPTOR.fields
    if phase.message_type is not None and not phase.is_repeated
    for column in phase.message_type.fields
    if column.type == FieldDescriptor.TYPE_BYTES and column.name != "digests"
]


@pytest.mark.parametrize(("phase", "column"), COLUMNS)
def test_a_column_that_ends_inside_a_number_makes_the_step_malformed(phase: str, column: str) -> None:
    step = packed.Step()
    setattr(getattr(step, phase), column, b"\1\0\0")
    with pytest.raises(Refusal) as refused:
        check_step(make_pool(), step)
    assert refused.value.reason == "MALFORMED"


def test_drops_that_make_a_step_too_long_are_refused_by_its_length() -> None:
    digests = bytes(limits.STEP_BYTES_MAX // limits.DROPS_PER_STEP_MAX)
    step = packed.Step(drops=[pb.CacheDrop(digests=digests)] * limits.DROPS_PER_STEP_MAX)
    with pytest.raises(Refusal, match=f"a step may have at most {limits.STEP_BYTES_MAX:,} bytes"):
        check_step(make_pool(), step)
