"""Responses that are kept for some time, in memory, each for the namespace of its caller.

Lifecycle of a response:

    1. begun   only in the background: the response has no output yet, and is replaced when it has ended
    2. kept    the response is found by its id, and can be continued
    3. gone    it was deleted, its time is over, or its memory was needed for a later response of its namespace

All lifetimes are equal, so the oldest response is always the next to expire.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from quire_gateway.continuing import Said
from quire_gateway.metrics import Telemetry
from quire_gateway.shares import Shares

COUNT_MAX: Final = 65_536
BYTES_EACH: Final = 2_048  # bytes charged for a response, in addition to its texts and tokens
BYTES_OF_ITEM: Final = 64  # bytes charged for an input item, in addition to its text
BYTES_OF_OUTPUT: Final = 512  # bytes charged for an output item and its entry in `_items`, in addition to its text


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that the store keeps, for retrieval and continuation.

    Attributes:
        head: the JSON of the response without its output.
        output: the JSON of each output item.
        items: the JSON of each input item; responses of one conversation share them.
        said: the tokens for a response that continues this one, with 32 bits each; None until the response has ended.
        expires_s: when it expires, by the clock of the store.
    """

    head: bytes
    output: tuple[bytes, ...]
    items: tuple[bytes, ...]
    said: Said | None
    expires_s: float

    @property
    def size_bytes(self) -> int:
        """Returns the bytes that the response takes. Shared items count fully."""
        items = sum(map(len, self.items)) + BYTES_OF_ITEM * len(self.items)
        tokens = 0 if self.said is None else 4 * (len(self.said.tokens) + len(self.said.as_split))
        output = sum(map(len, self.output)) + BYTES_OF_OUTPUT * len(self.output)
        return BYTES_EACH + len(self.head) + output + items + tokens

    @property
    def response(self) -> bytes:
        """Returns the JSON of the whole response, as its caller gets it."""
        return orjson.dumps({**orjson.loads(self.head), "output": [*map(orjson.Fragment, self.output)]})

    def conversation(self) -> tuple[bytes, ...]:
        """Returns the JSON of its input and output items."""
        return (*self.items, *self.output)


class Store:
    """The kept responses, by namespace and id.

    Attributes:
        are_several: whether there are several namespaces.

    Args:
        telemetry: counts the responses and their bytes.
        bytes_max: limit for all responses together; 0 keeps none.
        lifetime_s: how long each response is kept.
        are_several: whether there are several namespaces. Each may use at most half of what other namespaces leave.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        bytes_max: int,
        lifetime_s: float,
        are_several: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._telemetry, self._lifetime_s, self._clock = telemetry, lifetime_s, clock
        self.are_several = are_several
        self._bytes = Shares(bytes_max, is_for_several=are_several)
        self._places = Shares(COUNT_MAX, is_for_several=are_several)
        self._oldest_first: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._of: defaultdict[str, OrderedDict[str, StoredResponse]] = defaultdict(OrderedDict)
        # (namespace, id of an output item) -> (id of its response, index in the response's output)
        self._items: dict[tuple[str, str], tuple[str, int]] = {}

    def find(self, namespace: str, identity: str) -> StoredResponse | None:
        """Returns a response of a namespace; None if the namespace does not have it."""
        own = self._of.get(namespace)  # `self._of[namespace]` would add an entry for each unknown namespace.
        kept = None if own is None else own.get(identity)
        return None if kept is None or kept.expires_s <= self._clock() else kept

    def find_item(self, namespace: str, identity: str) -> bytes | None:
        """Returns the JSON of an output item of a stored response; None if the item does not exist."""
        response, place = self._items.get((namespace, identity), ("", 0))
        kept = self.find(namespace, response)
        return None if kept is None else kept.output[place]

    def put(self, namespace: str, response: dict[str, Any], items: tuple[bytes, ...], said: Said | None = None) -> bool:
        """Keeps a response, which replaces an earlier one with its id. Returns whether it is kept.

        If memory is short, the oldest responses of its namespace are removed.
        """
        self.remove(namespace, response["id"])
        now_s = self._clock()
        while self._oldest_first:
            key = next(iter(self._oldest_first))
            if self._of[key[0]][key[1]].expires_s > now_s:
                break
            self.remove(*key)
        if said is not None:
            said = said._replace(tokens=array("I", said.tokens), as_split=array("I", said.as_split))
        output = tuple(map(orjson.dumps, response["output"]))
        kept = StoredResponse(orjson.dumps({**response, "output": []}), output, items, said, now_s + self._lifetime_s)
        while not self._take(namespace, kept.size_bytes):
            if namespace not in self._of:
                return False
            self.remove(namespace, next(iter(self._of[namespace])))
        self._of[namespace][response["id"]] = kept
        for place, item in enumerate(response["output"]):
            self._items[namespace, item["id"]] = response["id"], place
        self._oldest_first[namespace, response["id"]] = None
        self._telemetry.stored_count += 1
        self._telemetry.stored_bytes += kept.size_bytes
        return True

    def remove(self, namespace: str, identity: str) -> bool:
        """Removes a response. Returns whether there was one that had not expired."""
        kept = self._of[namespace].pop(identity) if identity in self._of.get(namespace, ()) else None
        if kept is None:
            return False
        if not self._of[namespace]:
            del self._of[namespace]
        for item in kept.output:
            del self._items[namespace, orjson.loads(item)["id"]]
        del self._oldest_first[namespace, identity]
        self._bytes.give_back(namespace, kept.size_bytes)
        self._places.give_back(namespace, 1)
        self._telemetry.stored_count -= 1
        self._telemetry.stored_bytes -= kept.size_bytes
        return kept.expires_s > self._clock()

    def _take(self, namespace: str, size_bytes: int) -> bool:
        if not self._places.take(namespace, 1):
            return False
        if self._bytes.take(namespace, size_bytes):
            return True
        self._places.give_back(namespace, 1)
        return False

    def check_invariants(self) -> None:
        """Checks that the counts match the responses.

        Raises:
            AssertionError: they do not match.
        """
        found = {(namespace, identity): kept for namespace, own in self._of.items() for identity, kept in own.items()}
        assert found.keys() == self._oldest_first.keys()
        assert all(self._of.values())
        places = {(key, place) for key, kept in found.items() for place in range(len(kept.output))}
        assert {((namespace, where[0]), where[1]) for (namespace, _), where in self._items.items()} == places
        assert self._telemetry.stored_count == len(found)
        assert self._telemetry.stored_bytes == sum(kept.size_bytes for kept in found.values())
