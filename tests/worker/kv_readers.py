"""Readers of KV events: what a router keeps of them, and a subscriber with ZeroMQ."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import zmq

WAIT_MS = 60_000


class Block(NamedTuple):
    """A block as a router knows it."""

    parent: int | None
    tokens: tuple[int, ...]
    lora_name: str | None
    extra_keys: tuple[str, ...] | None


@dataclass
class Reader:
    """The blocks that a reader knows by their hashes. Fails for events that a router could not use."""

    blocks: dict[int, Block] = field(default_factory=dict)
    cleared_count: int = 0

    def apply(self, events: list[dict[str, Any]]) -> None:
        """Applies the events of one message."""
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.blocks.clear()
                    self.cleared_count += 1
                case "BlockRemoved":
                    for each in event["block_hashes"]:
                        del self.blocks[each]
                case "BlockStored":
                    self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        assert parent is None or parent in self.blocks
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for place, (each, extra) in enumerate(zip(event["block_hashes"], keys, strict=True)):
            tokens = tuple(event["token_ids"][place * size : (place + 1) * size])
            self.blocks[each] = Block(parent, tokens, event["lora_name"], extra and tuple(extra))
            parent = each

    def prompts(self) -> set[tuple[int, ...]]:
        """Returns the prefixes that end with each known block."""
        return {self._prefix(each) for each in self.blocks}

    def _prefix(self, block: int | None) -> tuple[int, ...]:
        return () if block is None else self._prefix(self.blocks[block].parent) + self.blocks[block].tokens


class Message(NamedTuple):
    """A message as it came."""

    number: int
    payload: bytes

    @property
    def events(self) -> list[dict[str, Any]]:
        """Returns the message's events as plain maps."""
        return msgspec.msgpack.decode(self.payload)[1]


class Subscriber:
    """A subscriber that asks for missed messages, as routers do. It reads in the test's thread, within `with`.

    Attributes:
        reader: the blocks that the subscriber knows.
        messages: all messages that the subscriber applied, in order.
        is_live: whether any message came unasked.
    """

    def __init__(self, address: str, replay_address: str) -> None:
        self.reader, self.messages, self.is_live = Reader(), list[Message](), False
        self._context, self._replay_address = zmq.Context(), replay_address
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(address)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    @property
    def next_number(self) -> int:
        """Returns the number of the first message that the subscriber lacks."""
        return self.messages[-1].number + 1 if self.messages else 0

    def read(self) -> None:
        """Applies the messages that have arrived, and the missed messages before them."""
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            message, self.is_live = Message(int.from_bytes(number, "big"), payload), True
            if message.number > self.next_number:
                self.catch_up()
            self._take(message)

    def catch_up(self) -> None:
        """Asks for missing messages: the first messages are sent before the subscription has arrived."""
        for message in self.replayed(self.next_number):
            self._take(message)

    def replayed(self, first: int) -> list[Message]:
        """Asks for the messages from a number on."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._replay_address)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        messages = []
        while True:
            assert socket.poll(WAIT_MS), "no answer came"
            _, _, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                socket.close(linger=0)
                return messages
            messages.append(Message(int.from_bytes(number, "big"), payload))

    def _take(self, message: Message) -> None:
        if message.number >= self.next_number:
            self.messages.append(message)
            self.reader.apply(message.events)
