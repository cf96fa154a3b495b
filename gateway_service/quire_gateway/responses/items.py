"""Items of a conversation: as callers send them, as the store keeps them, and as messages of a chat."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import orjson

from quire_gateway.failures import ApiError, invalid, missing, unsupported

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# Known keys of each type of item. Other keys, such as `phase` and `namespace`, would not reach any template.
_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "message": frozenset({"role", "content"}),
    "function_call": frozenset({"call_id", "name", "arguments"}),
    "function_call_output": frozenset({"call_id", "output"}),
    "reasoning": frozenset({"summary", "content", "encrypted_content"}),
}
_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_REFERENCE: Final = "item_reference"
ID_CHARACTERS_MAX: Final = 128


def new_id(kind: str) -> str:
    """Returns a new id for an item of this type."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"


def items_of(
    given: str | list[dict[str, Any]], find: Callable[[str], bytes | None] = lambda _: None
) -> list[dict[str, Any]]:
    """Returns an input as items with ids.

    Args:
        given: the input that the caller sent.
        find: returns the JSON of an earlier item by its id; None if the item does not exist.

    Raises:
        ApiError: an item cannot be part of a chat, refers to an unknown item, or repeats a reference.
    """
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    items: list[dict[str, Any]] = []
    referred: set[str] = set()
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if item.get("type") != _REFERENCE:
            items.append(_item(item, where))
            continue
        identity = _reference(item, where)
        if identity in referred:  # By repeated references, a short body could become an endless conversation.
            raise invalid(f"{where}.id", f"{where}.id is {identity!r}, which an earlier item already refers to")
        referred.add(identity)
        found = find(identity)
        if found is None:
            what = f"Item with id {identity!r} not found: no stored response has it. Send the item itself."
            raise ApiError(404, what, param=f"{where}.id", code="item_not_found")
        items.append(orjson.loads(found))
    return items


def _reference(given: Mapping[str, Any], where: str) -> str:
    """Returns the id in a reference item.

    Raises:
        ApiError: the item has no id, or another key.
    """
    _check_keys(given, frozenset({"type", "id"}), where)
    identity = _text_at(given, "id", where)
    if not 0 < len(identity) <= ID_CHARACTERS_MAX:
        raise invalid(f"{where}.id", f"{where}.id must be a string of 1 to {ID_CHARACTERS_MAX} characters")
    return identity


def _item(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    match given.get("type", "message"):
        case "message":
            return _message(given, where)
        case "function_call":
            return {
                **_head(given, "function_call", where),
                "status": "completed",
                "call_id": _text_at(given, "call_id", where),
                "name": _text_at(given, "name", where),
                "arguments": _text_at(given, "arguments", where),
            }
        case "function_call_output":
            output = given.get("output")
            if not isinstance(output, str):
                output = _joined(output, f"{where}.output")
            head = _head(given, "function_call_output", where)
            return {**head, "status": "completed", "call_id": _text_at(given, "call_id", where), "output": output}
        case "reasoning":
            content = given.get("content") or given.get("summary") or []
            if given.get("encrypted_content") and not content:
                what = "comes from another server and cannot be read: give content or summary, or leave the item out"
                raise unsupported(f"{where}.encrypted_content", what)
            text = _joined(content, f"{where}.content", {"reasoning_text": "text", "summary_text": "text"})
            told = [{"type": "reasoning_text", "text": text}]
            return {**_head(given, "reasoning", where), "status": "completed", "summary": [], "content": told}
        case other:
            known = ", ".join((*_PREFIXES, _REFERENCE))
            raise unsupported(f"{where}.type", f"is {str(other)[:64]!r}: this server accepts {known}")


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = _text_at(given, "role", where)
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be {', '.join(_ROLES)}, not {role[:64]!r}")
    content = given.get("content")
    text = content if isinstance(content, str) else _joined(content, f"{where}.content")
    part: dict[str, Any] = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {**_head(given, "message", where), "status": "completed", "role": role, "content": [part]}


def _head(given: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Returns id and type of an item. A caller's id is kept, but items cannot be found by this id.

    Raises:
        ApiError: the id is not a text, or the item has an unknown key.
    """
    _check_keys(given, _KEYS[kind] | {"type", "id", "status"}, where)
    identity = given.get("id")
    if identity is not None and (not isinstance(identity, str) or not 0 < len(identity) <= ID_CHARACTERS_MAX):
        raise invalid(f"{where}.id", f"{where}.id must be a string of 1 to {ID_CHARACTERS_MAX} characters")
    return {"id": identity or new_id(kind), "type": kind}


def _check_keys(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = next((name for name, value in given.items() if value is not None and name not in known), None)
    if unknown is not None:
        raise unsupported(f"{where}.{unknown}"[:128], f"is not a known field: known are {', '.join(sorted(known))}")


def _text_at(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if value is None:
        raise missing(f"{where}.{name}")
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", f"{where}.{name} must be a string")
    return value


def _joined(parts: Any, where: str, kinds: Mapping[str, str] = _TEXTS) -> str:
    """Returns the texts of parts as one text.

    Raises:
        ApiError: this is not a list of parts, or a part is not a text.
    """
    if parts is None:
        raise missing(where)
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid(where, f"{where} must be a string or an array of parts")
    texts = []
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        if part.get("type") not in kinds:
            raise unsupported(place, f"is of type {str(part.get('type'))[:64]!r}: this server accepts only text")
        texts.append(_text_at(part, kinds[part["type"]], place))
    return "\n".join(texts)


def messages_of(items: Iterable[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Returns items as messages of a chat. Successive reasoning, text and calls of a model become one message."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "message":
                text = item["content"][0]["text"]
                if item["role"] == "assistant":
                    _said(messages, "content", "tool_calls")["content"] = text
                else:
                    messages.append({"role": _ROLES[item["role"]], "content": text})
            case "reasoning":
                said = _said(messages, "content", "tool_calls", "reasoning_content")
                said["reasoning_content"] = said["reasoning"] = item["content"][0]["text"]
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _said(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    return messages


def _said(messages: list[dict[str, Any]], *without: str) -> dict[str, Any]:
    """Returns the assistant's message that is being written.

    Starts a new one if the last message is not the assistant's, or already has a field of `without`.
    """
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in without):
        messages.append({"role": "assistant"})
    return messages[-1]
