"""Derives `quire/v1/_packed.proto` from allocator.proto: a step's messages with `bytes` in place of each column.

A packed column and `bytes` are the same on the wire. Reading a column as `bytes` avoids an object for each entry
(docs/decisions/0013). `generate_protos.sh` calls this script with a descriptor set of allocator.proto and all its
imports, and the script adds the twin to the set.
"""

from __future__ import annotations

import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

PUBLIC, TWIN = "quire/v1/allocator.proto", "quire/v1/_packed.proto"
PACKAGE = ".quire.v1."
COLUMN_TYPES = (
    FieldDescriptorProto.TYPE_FIXED32,
    FieldDescriptorProto.TYPE_SFIXED32,
    FieldDescriptorProto.TYPE_FIXED64,
)
ENVELOPES = ("SessionRequest", "SessionReply")  # messages that carry a step and its answer


def is_column(field: FieldDescriptorProto) -> bool:
    """Returns whether the field is a packed array of numbers."""
    return field.label == FieldDescriptorProto.LABEL_REPEATED and field.type in COLUMN_TYPES


def with_columns(messages: dict[str, DescriptorProto], name: str) -> set[str]:
    """Returns the names of the messages that have columns, or contain a message with columns: `name` and the messages
    inside it."""
    found: set[str] = set()
    for field in messages[name].field:
        inner = field.type_name.removeprefix(PACKAGE)
        if inner in messages:
            found |= with_columns(messages, inner)
        if is_column(field):
            found.add(name)
    return found | {name} if found else found


def twin_of(public: FileDescriptorProto) -> FileDescriptorProto:
    """Returns the twin. The private file imports messages without columns from the public file."""
    messages = {message.name: message for message in public.message_type}
    names = {*ENVELOPES, *with_columns(messages, "Step"), *with_columns(messages, "StepReply")}
    twin = FileDescriptorProto(name=TWIN, package="quire.v1.packed", syntax="proto3", dependency=[PUBLIC])
    for message in public.message_type:
        if message.name in names:
            twin.message_type.add().CopyFrom(message)
    for message in twin.message_type:
        for field in message.field:
            if is_column(field):
                field.type, field.label = FieldDescriptorProto.TYPE_BYTES, FieldDescriptorProto.LABEL_OPTIONAL
                field.ClearField("options")
            elif field.type_name.removeprefix(PACKAGE) in names:
                field.type_name = f"{PACKAGE}packed.{field.type_name.removeprefix(PACKAGE)}"
    return twin


def main() -> None:
    """Adds the twin to the descriptor set in a file."""
    path = Path(sys.argv[1])
    files = FileDescriptorSet.FromString(path.read_bytes())
    public = next(file for file in files.file if file.name == PUBLIC)
    files.file.add().CopyFrom(twin_of(public))
    path.write_bytes(files.SerializeToString())


if __name__ == "__main__":
    main()
