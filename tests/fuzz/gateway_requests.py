"""Makes requests to the gateway: bodies that match its OpenAPI description or not, and heads as bytes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

EDGES: tuple[object, ...] = (
    *(0, 1, -1, 2**31 - 1, 2**31, 2**53 + 1, 2**64, -(2**63), 10**400, 0.0, 0.5, -0.5, 1e-9, 1e308, 16.0),
    *("", "a", "\x00", "\u2603", "\U0001f600", "\x1b[31m", "1_0", "null", "x" * 300),
    *(
        None,
        True,
        False,
        [],
        {},
        [[]],
        [None],
        {"": ""},
        [1, "a"],
        {"type": "text"},
        {"type": "json_object", "schema": {}},
    ),
)
TEXTS = ("a", "user", "system", "none", "text")
UPGRADES = (
    "",
    "",
    "Connection: Upgrade\r\nUpgrade: h2c\r\n",
    "Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\n",
)
BODIES = {
    "/v1/completions": "CompletionBody",
    "/v1/chat/completions": "ChatBody",
    "/v1/responses": "ResponseBody",
    "/v1/branches": "PrefillBody",
    "/v1/branches/branch_00/score": "ScoreBody",
    "/v1/cache/match": "MatchBody",
    "/v1/cache/drop": "DropBody",
}
PATHS = (
    *BODIES,
    "/v1/responses/resp_0/input_items?limit=1",
    "/v1/models",
    "/v1/models/a%2Fb",
    "/healthz",
    "/metrics",
    "/no?a=b",
)


@dataclass(slots=True)
class Sent:
    """The bytes of one connection.

    Attributes:
        data: all bytes.
        ids: ids of the requests, in order.
        hidden: ids that occur only in bodies.
        is_whole: whether the framing is intact, so that every request must be answered.
    """

    data: bytes
    ids: list[str]
    hidden: list[str]
    is_whole: bool


def value_of(dice: random.Random, schema: Any, schemas: dict[str, Any], depth: int = 0) -> object:
    """Returns a value that matches a schema, or now and then a value that does not match."""
    if dice.random() < 0.15 or depth > 5:
        return dice.choice(EDGES)
    if "$ref" in schema:
        return value_of(dice, schemas[schema["$ref"].rpartition("/")[2]], schemas, depth)
    if "anyOf" in schema:
        return value_of(dice, dice.choice(schema["anyOf"]), schemas, depth + 1)
    choices = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    kinds = {"array": list_of, "object": object_of, "integer": number_of, "number": number_of}
    if choices or schema.get("type") not in kinds:
        return dice.choice(choices or {"boolean": (True, False), "string": TEXTS}.get(schema.get("type"), EDGES))
    return kinds[schema["type"]](dice, schema, schemas, depth + 1)


def structure_of(dice: random.Random) -> object:
    """Returns a structure in vLLM's form. The OpenAPI description says only that it is an object."""
    value = dice.choice((*EDGES, "[a-z]", "start: /a/", ["a", "b"], {"type": "object"}, '{"type": "integer"}'))
    return {dice.choice(("json", "regex", "choice", "grammar", "json_object")): value}


def right_but_for_one(dice: random.Random, schema: Any, schemas: dict[str, Any]) -> object:
    """Returns a body with at most one wrong field. If that field is right too, the gateway calls a worker."""
    known = schema["properties"]
    body: dict[str, object] = {"prompt": "a"} if "prompt" in known else {"messages": [{"role": "user", "content": "a"}]}
    name = "structured_outputs" if dice.random() < 0.1 else dice.choice(list(known))
    body[name] = structure_of(dice) if name == "structured_outputs" else value_of(dice, known[name], schemas)
    return body


def list_of(dice: random.Random, schema: Any, schemas: dict[str, Any], depth: int) -> object:
    return [value_of(dice, schema.get("items", {}), schemas, depth) for _ in range(dice.choice((0, 1, 2, 65)))]


def object_of(dice: random.Random, schema: Any, schemas: dict[str, Any], depth: int) -> object:
    known, required = schema.get("properties", {}), schema.get("required", ())
    names = [name for name in known if dice.random() < 0.1 or name in required]
    found = {name: value_of(dice, known[name], schemas, depth) for name in names}
    further = schema.get("additionalProperties", False)
    if further is not False:
        found["7"] = value_of(dice, further if isinstance(further, dict) else {}, schemas, depth)
    return found


def number_of(dice: random.Random, schema: Any, _schemas: dict[str, Any], _depth: int) -> object:
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    edge = dice.choice([schema[name] for name in bounds if name in schema] or [1])
    return edge + dice.choice((-1, 0, 0, 1)) if schema["type"] == "integer" else edge * dice.choice((1, 1, 0.5, 1.1))


def body_of(dice: random.Random, described: dict[str, Any], path: str) -> bytes:
    """Returns a body for a route: by its schema, with a few bytes changed, or an edge case of JSON."""
    schemas = described["components"]["schemas"]
    schema = schemas[BODIES[path]]
    value = value_of(dice, schema, schemas)
    if "messages" in schema["properties"] and dice.random() < 0.5:
        value = right_but_for_one(dice, schema, schemas)
    text = json.dumps(value).encode()
    luck = dice.random()
    if luck < 0.1:
        return changed(dice, text)
    if luck < 0.15:
        return dice.choice(
            (b"", b"[" * 5_000, b'"\\ud800"', b'{"prompt":1e999}', b"\xff\xfe", b'{"a":' * 999, b"NaN", b" ")
        )
    return text


def changed(dice: random.Random, data: bytes) -> bytes:
    """Returns the bytes with some of them changed, left out, or doubled."""
    found = bytearray(data)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(found) + 1)
        match dice.randrange(4):
            case 0:
                found[at:at] = dice.choice((b"\r\n", b"\n", b":", b" ", b"\x00", b"0", b"\xff", b",", b";", b"chunked"))
            case 1:
                del found[at : at + dice.randrange(1, 9)]
            case 2:
                found[at : at + 1] = bytes([dice.randrange(256)])
            case _:
                found[at:at] = found[at : at + dice.randrange(1, 99)]
    return bytes(found)


def connection_of(dice: random.Random, described: dict[str, Any], serial: int) -> Sent:
    """Makes one to four requests of one connection. The first requests may hide further requests in their bodies."""
    data, ids, hidden = b"", list[str](), list[str]()
    count = dice.randrange(1, 5)
    for number in range(count):
        name = f"r{serial}-{number}"
        path = dice.choice(PATHS)
        method = "POST" if path in BODIES else dice.choice(("GET", "GET", "POST", "HEAD", "OPTIONS", "PUT"))
        body = body_of(dice, described, path) if path in BODIES else b""
        if path in BODIES and dice.random() < 0.2:
            hidden.append(f"h{serial}-{number}")
            body = f"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Request-Id: {hidden[-1]}\r\n\r\n".encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {name}\r\n{dice.choice(UPGRADES)}"
        head += dice.choice(("", "Expect: 100-continue\r\n", "Content-Type: text/plain\r\n", "X-Y: \u2603\r\n"))
        head += "Content-Type: application/json\r\n" if "Content-Type" not in head else ""
        if body and dice.random() < 0.3:
            data += f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + in_chunks(dice, body)
        else:
            data += f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        ids.append(name)
    is_whole = dice.random() < 0.6
    return Sent(data if is_whole else changed(dice, data), ids, hidden, is_whole)


def in_chunks(dice: random.Random, body: bytes) -> bytes:
    """Returns the body in HTTP chunks of random sizes, some with extensions."""
    found, at = b"", 0
    while at < len(body):
        size = dice.choice((1, 7, 1_000))
        part = body[at : at + size]
        found += b"%x%b\r\n%b\r\n" % (len(part), dice.choice((b"", b"", b";a=b")), part)
        at += size
    return found + b"0\r\n" + dice.choice((b"", b"", b"X-Trailer: y\r\n")) + b"\r\n"
