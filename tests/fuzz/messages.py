"""Makes malformed messages from one source of chance: random messages of a type, changed valid messages, and changed
bytes.

The source may be seeded, Hypothesis' own (which shrinks failures), or a fuzzer's bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MessageT = TypeVar("MessageT", bound=Message)

NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 255, 1023, 65_535, 65_536, 65_537, 1 << 24)
UINT32 = (*NUMBERS, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1)
UINT64 = (*UINT32, 1 << 32, 1 << 53, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1)
INT = (*NUMBERS, -1, (1 << 31) - 1, -(1 << 31))
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-9, 1e9, 3.4e38, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "a", "*", "é", "pool", "x" * 64, "x" * 65, "x" * 128, "é" * 64, "é" * 65, "x" * 129, "\0", "a/b", "a b")
LENGTHS = (0, 1, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 96, 128, 1024)

C = FieldDescriptor
_NUMBERS = {
    C.CPPTYPE_UINT32: UINT32,
    C.CPPTYPE_UINT64: UINT64,
    C.CPPTYPE_INT32: INT,
    C.CPPTYPE_INT64: INT,
    C.CPPTYPE_FLOAT: FLOATS,
    C.CPPTYPE_DOUBLE: FLOATS,
    C.CPPTYPE_BOOL: (True, False),
}


class Malformer:
    """Makes malformed messages.

    Args:
        chance: the source of all random choices.

    Attributes:
        words: bytes that mean something to the receiver, such as session ids and digests.
        names, numbers: texts and numbers that mean something to the receiver.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.words: list[bytes] = [b""]
        self.names: list[str] = [""]
        self.numbers: list[int] = [0]

    def anything(self, kind: type[MessageT], depth: int = 3) -> MessageT:
        """Returns a message of this type with random fields set to random values."""
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if self.chance.random() < 0.5:
                self._set(message, field, depth)
        return message

    def changed(self, message: MessageT) -> MessageT:
        """Returns a copy with up to three changes at random places."""
        copy = type(message)()
        copy.CopyFrom(message)
        for _ in range(self.chance.randint(1, 3)):
            self._change(copy)
        return copy

    def in_bytes(self, message: MessageT) -> MessageT | None:
        """Returns a copy with its bytes changed; None if they can no longer be parsed."""
        data = self.scrambled(message.SerializeToString())
        try:
            return type(message).FromString(data)
        except DecodeError:
            return None

    def scrambled(self, data: bytes) -> bytes:
        """Returns the bytes with some flipped, cut, doubled or inserted."""
        chance, changed = self.chance, bytearray(data)
        for _ in range(chance.randint(1, 4)):
            place = chance.randint(0, len(changed))
            match chance.randint(0, 4):
                case 0 if changed:
                    changed[place % len(changed)] ^= 1 << chance.randint(0, 7)
                case 1:
                    changed[place : place + chance.randint(1, 8)] = b""
                case 2:
                    changed[place:place] = changed[place : place + chance.randint(1, 40)]
                case 3:
                    changed[place:place] = bytes(chance.randint(0, 255) for _ in range(chance.randint(1, 6)))
                case _:
                    changed[place:place] = chance.choice(self.words)
        return bytes(changed)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _value(self, field: FieldDescriptor) -> Any:
        chance = self.chance
        if field.cpp_type == C.CPPTYPE_STRING:
            if field.type == C.TYPE_BYTES:
                return chance.choice(self.words) if chance.random() < 0.6 else bytes(chance.choice(LENGTHS))
            return chance.choice(self.names) if chance.random() < 0.6 else chance.choice(TEXTS)
        if field.cpp_type == C.CPPTYPE_ENUM:
            return chance.choice([value.number for value in field.enum_type.values] + [99])
        if field.cpp_type in (C.CPPTYPE_UINT32, C.CPPTYPE_UINT64) and chance.random() < 0.5:
            number = max(0, chance.choice(self.numbers) + chance.randint(-1, 1))
            return number & (0xFFFFFFFF if field.cpp_type == C.CPPTYPE_UINT32 else 0xFFFFFFFFFFFFFFFF)
        return chance.choice(_NUMBERS[field.cpp_type])

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        name, chance = field.name, self.chance
        if field.message_type is not None:
            if depth <= 0:
                return
            kind = type(getattr(message, name).add() if field.is_repeated else getattr(message, name))
            message.ClearField(name)
            if field.is_repeated:
                getattr(message, name).extend([self.anything(kind, depth - 1) for _ in range(chance.randint(0, 3))])
            else:
                getattr(message, name).CopyFrom(self.anything(kind, depth - 1))
        elif field.is_repeated:
            message.ClearField(name)
            getattr(message, name).extend([self._value(field) for _ in range(chance.randint(0, 4))])
        else:
            setattr(message, name, self._value(field))

    def _change(self, message: Message) -> None:
        """Changes one field of this message or of a message inside it."""
        chance = self.chance
        inside = [value for _, value in _messages_in(message)]
        if inside and chance.random() < 0.8:
            self._change(chance.choice(inside))
            return
        if not message.DESCRIPTOR.fields:
            return
        present = [field for field, _ in message.ListFields()]
        use_present = present and chance.random() < 0.7
        field = chance.choice(present if use_present else message.DESCRIPTOR.fields)
        if not field.is_repeated:
            if chance.random() < 0.2:
                message.ClearField(field.name)
            else:
                self._set(message, field, 2)
            return
        values = getattr(message, field.name)
        match chance.randint(0, 4):
            case 0 if values:
                del values[chance.randrange(len(values))]
            case 1 if values:
                values.extend([values[chance.randrange(len(values))]])
            case 2 if values and field.message_type is None:
                values[chance.randrange(len(values))] = self._value(field)
            case 3 if values and field.message_type is None:
                values.extend([self._value(field)] * chance.choice((1, 10, 1000)))
            case _:
                self._set(message, field, 2)


def _messages_in(message: Message) -> Sequence[tuple[FieldDescriptor, Message]]:
    found = []
    for field, value in message.ListFields():
        if field.message_type is not None:
            found += [(field, item) for item in (value if field.is_repeated else [value])]
    return found
