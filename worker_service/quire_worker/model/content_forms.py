"""Finds out in which form a chat template takes the contents of messages: as one text, or as a list of parts.

A template that loops over parts ignores a text, and the model would not see the message. So a template is tried with a
text that no template contains, in place of the contents of one role:

    1. alone    in a short conversation that most templates accept
    2. inside   in the caller's conversation, if the template wrote neither form: it may need tools, variables, a
                system prompt or calls
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

Message: TypeAlias = dict[str, Any]
Render: TypeAlias = Callable[[list[Message]], str]

_PROBE: Final = "719402683"  # digits, because templates may change the case of letters, or replace some letters
# For each role, the roles of the messages before and after it in a conversation that most templates accept.
_AROUND: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "user": ((), ()),
    "system": ((), ("user",)),
    "developer": ((), ("user",)),
    "assistant": (("user",), ()),
    "tool": (("user", "assistant"), ()),
}
_AROUND_OTHERS: Final = (("user",), ())


def fitted(messages: Sequence[Message], render: Render, render_bare: Render) -> list[Message]:
    """Returns messages with their contents in the form that a template takes. Contents that are not only text stay.

    Args:
        messages: the messages of a conversation.
        render: renders other messages with the conversation's tools and variables.
        render_bare: renders other messages without these; it costs less.
    """
    takes_parts: dict[str, bool] = {}
    result = []
    for message in messages:
        parts = _texts(message)
        if not parts:
            result.append(message)
            continue
        role = message["role"]
        if role not in takes_parts:
            takes_parts[role] = _takes_parts(role, messages, render, render_bare)
        content = parts if takes_parts[role] else "\n".join(part["text"] for part in parts)
        result.append({**message, "content": content})
    return result


def _texts(message: Message) -> list[Any]:
    """Returns the parts of a message's content; none if the content is empty, or not only text."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return parts if all(map(_is_text, parts)) else []


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _takes_parts(role: str, messages: Sequence[Message], render: Render, render_bare: Render) -> bool:
    """Returns whether the template writes the contents of a role only if these are lists of parts."""
    before, after = _AROUND.get(role, _AROUND_OTHERS)
    alone: list[Message] = [{"role": each, "content": "x"} for each in (*before, role, *after)]
    for tried, rendered in ((alone, render_bare), (alone, render), (messages, render)):
        for is_parts in (False, True):
            # The contents of the other roles may have the same form as this role's, or the other form.
            if any(_writes(tried, role, is_parts, others, rendered) for others in (is_parts, not is_parts)):
                return is_parts
    return False


def _writes(messages: Sequence[Message], role: str, is_parts: bool, are_others_parts: bool, render: Render) -> bool:
    """Returns whether the template writes a role's contents in one form, beside other roles' contents in a form."""
    forms: dict[bool, Any] = {}
    for is_probed, in_parts in ((True, is_parts), (False, are_others_parts)):
        text = _PROBE if is_probed else "x"
        forms[is_probed] = [{"type": "text", "text": text}] if in_parts else text
    tried = [
        {**message, "content": forms[message["role"] == role]} if _texts(message) else message for message in messages
    ]
    try:
        return _PROBE in render(tried)
    except MemoryError:
        raise
    except Exception:  # a template's operators raise the exceptions of Python's operators
        return False
