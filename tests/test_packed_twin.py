"""A step's messages have private twins with columns of bytes. Both read and write the same bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from quire.protocol.packing import as_int32, unpack_uint32, unpack_uint64
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

TWINS: list[Descriptor] = list(packed.DESCRIPTOR.message_types_by_name.values())
NUMBERS = {
    FieldDescriptor.TYPE_FIXED32: unpack_uint32,
    FieldDescriptor.TYPE_SFIXED32: lambda data: as_int32(unpack_uint32(data)),
    FieldDescriptor.TYPE_FIXED64: unpack_uint64,
}


def public(twin: Descriptor) -> Descriptor:
    found: Descriptor = pb.DESCRIPTOR.message_types_by_name[twin.name]
    return found


def is_column(field: FieldDescriptor) -> bool:
    return field.is_repeated and field.type in NUMBERS


def shape(field: FieldDescriptor) -> tuple[Any, ...]:
    """Returns everything that determines a field's encoding. A packed column counts as `bytes`."""
    if is_column(field):
        return field.name, FieldDescriptor.TYPE_BYTES, False, None
    inner = field.message_type or field.enum_type
    return field.name, field.type, field.is_repeated, inner and inner.name


def inside(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for field in message.fields:
        if field.message_type is not None:
            yield from inside(field.message_type)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_a_twin_has_the_fields_and_numbers_of_its_public_message(twin: Descriptor) -> None:
    fields = {field.number: shape(field) for field in public(twin).fields}
    assert {field.number: shape(field) for field in twin.fields} == fields


def test_every_column_of_a_step_and_of_its_answer_has_a_twin() -> None:
    for name in ("Step", "StepReply"):
        twins = packed.DESCRIPTOR.message_types_by_name
        assert not [each.full_name for each in inside(twins[name]) if any(map(is_column, each.fields))]
        with_columns = {each.name for each in inside(public(twins[name])) if any(map(is_column, each.fields))}
        assert with_columns <= set(twins)


def fill(message: Message, dice: random.Random) -> None:
    """Sets most fields at random."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.2:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(message, field.name)
            for each in [inner.add() for _ in range(dice.randint(1, 3))] if field.is_repeated else [inner]:
                fill(each, dice)
        elif field.is_repeated:
            getattr(message, field.name).extend([value(field, dice) for _ in range(dice.randint(1, 20))])
        else:
            setattr(message, field.name, value(field, dice))


def value(field: FieldDescriptor, dice: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return dice.randbytes(dice.randint(1, 64))
    if field.type == FieldDescriptor.TYPE_STRING:
        return dice.choice(("tenant", "übermut"))
    if field.type in (FieldDescriptor.TYPE_ENUM, FieldDescriptor.TYPE_BOOL):
        return dice.randint(0, 1)
    if field.type in (FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_SINT32):
        return dice.getrandbits(32) - (1 << 31)
    return dice.getrandbits(64 if field.type in (FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_UINT64) else 32)


def compare(message: Message, twin: Message) -> None:
    if type(message) is type(twin):
        assert message == twin
        return
    for field in message.DESCRIPTOR.fields:
        ours, theirs = getattr(message, field.name), getattr(twin, field.name)
        if is_column(field):
            assert list(NUMBERS[field.type](theirs)) == list(ours)
        elif field.message_type is None:
            assert theirs == ours
        else:
            for each, other in zip(*((ours, theirs) if field.is_repeated else ([ours], [theirs])), strict=True):
                compare(each, other)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["Step", "StepReply", "SessionRequest", "SessionReply"])
def test_both_read_and_write_the_same_bytes(name: str, seed: int) -> None:
    message = getattr(pb, name)()
    fill(message, random.Random(seed))
    data = message.SerializeToString(deterministic=True)
    twin = getattr(packed, name).FromString(data)
    compare(message, twin)
    assert twin.SerializeToString(deterministic=True) == data
    assert getattr(pb, name).FromString(data) == message
