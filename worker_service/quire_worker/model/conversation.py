"""Rendering of conversations as text, by the checkpoint's chat template.

A template is a program in the Jinja language. The template runs in transformers' sandbox, and can read only its
arguments. The template is trusted as far as the checkpoint is.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jinja2

from quire_worker.model.content_forms import fitted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt"})
# Arguments of transformers' methods that are not variables of the template. Callers must not set them through
# `variables`. A test compares this list with the installed release.
TOKENIZER_OPTIONS: Final = frozenset(
    {"self", "conversation", "conversations", "chat_template", "documents", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs", "sanitize_control_tokens"}
)
MESSAGE_COUNT_MAX: Final = 16_384  # a template's time may grow with the square of the message count
TOOL_COUNT_MAX: Final = 4_096
DEPTH_MAX: Final = 100  # deepest nesting of arrays and objects, so that no recursion reaches Python's limit
SIGN: Final = "\U0010fff0"  # a private-use character that marks where `sign` cuts a text
JOINED_MAX: Final = 3  # most characters of a special token that a template may write before or behind a text
# A template may write a special token of each of these roles, as in `'<|' + role + '|>'`.
KNOWN_ROLES: Final = frozenset(
    {"system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "environment", "observation"}
)


class TemplateError(Exception):
    """The template itself is at fault. The message is for the log."""


class ConversationError(Exception):
    """A conversation cannot be rendered. The message is only for its caller.

    Attributes:
        field: the field of the conversation that causes the error.
    """

    def __init__(self, message: str, field: str = "messages") -> None:
        super().__init__(message)
        self.field = field


class Conversation(NamedTuple):
    """Arguments of a chat template. The arguments also travel to the process that runs the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    with_generation_prompt: bool
    continues_final: bool = False  # whether the text ends with the last message's content
    template: str = ""  # replaces the checkpoint's template, if it is not empty


def read_conversation(
    messages_json: str, tools_json: str, variables_json: str, *, with_generation_prompt: bool
) -> Conversation:
    """Reads a conversation from the JSON texts of a request.

    Raises:
        ConversationError: a text is not JSON, does not have the expected form, or is nested too deeply.
    """
    messages = _objects(messages_json, "messages", MESSAGE_COUNT_MAX)
    if not messages:
        raise ConversationError("messages must not be empty")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ConversationError(f"messages[{number}] has no role")
    variables = _parsed(variables_json or "{}", "variables")
    if not isinstance(variables, dict):
        raise ConversationError("variables must be an object", "variables")
    taken = sorted((RESERVED | TOKENIZER_OPTIONS) & variables.keys())
    if taken:
        raise ConversationError(f"variables has {taken[0]!r}, which a request may not set", "variables")
    return Conversation(
        messages, _objects(tools_json or "[]", "tools", TOOL_COUNT_MAX), variables, with_generation_prompt
    )


def _objects(text: str, name: str, count_max: int) -> list[dict[str, Any]]:
    values = _parsed(text, name)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ConversationError(f"{name} must be an array of objects", name)
    if len(values) > count_max:
        raise ConversationError(f"{name} must have at most {count_max:,} entries, not {len(values):,}", name)
    return values


def _parsed(text: str, name: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ConversationError(f"{name} is not JSON, or is nested too deeply", name) from None
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [part for each in level if isinstance(each, list | dict) for part in _parts(each)]
        if not level:
            return value
    raise ConversationError(f"{name} must be nested at most {DEPTH_MAX} deep", name)


def _parts(value: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


class _Special:
    """Names of special tokens, and the pieces of names that a template could join to a whole name."""

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(names, key=len, reverse=True)
        self.whole = re.compile("|".join(map(re.escape, ordered)))
        self.beginnings = frozenset(name[:end] for name in ordered for end in range(1, len(name)))
        cut = {name[start:] for name in ordered for start in range(1, min(JOINED_MAX, len(name) - 1) + 1)}
        self.ends = frozenset(end for end in cut if len(end) > 1)
        ends = {end[: len(end) - count] for end in cut for count in range(1, JOINED_MAX + 1)}
        # A word counts as a piece only in roles and names of messages, since templates compare types with words.
        self.middles = frozenset(middle for middle in ends if middle and not middle.isidentifier())
        self.words = frozenset(middle.lower() for middle in ends if middle.isidentifier())
        self.sizes = range(1, len(ordered[0]))


@functools.lru_cache(maxsize=8)
def _special_of(names: tuple[str, ...]) -> _Special:
    return _Special(names)


def sign(conversation: Conversation, special: Sequence[str]) -> Conversation:
    """Inserts `SIGN` into special tokens' names, and pieces of such names, in the conversation's texts and names.

    So the parts between signs never spell a special token, whatever a template does to the texts. A template may join
    texts, and put up to `JOINED_MAX` characters around a text.
    """
    names = [name for name in special if len(name) > 1]
    if not names:
        return conversation
    pieces = _special_of(tuple(names))
    messages, tools = (_signed(each, pieces) for each in conversation[:2])
    for message in messages:
        for key, known in (("role", KNOWN_ROLES), ("name", frozenset[str]())):
            word = message.get(key)
            if isinstance(word, str) and word not in known and word.strip().lower() in pieces.words:
                message[key] = SIGN + word.strip()
    variables = {name: _signed(value, pieces) for name, value in conversation.variables.items()}
    return conversation._replace(messages=messages, tools=tools, variables=variables)


def _signed(value: Any, special: _Special) -> Any:
    if isinstance(value, str):
        return _signed_text(value, special)
    if isinstance(value, list):
        return [_signed(each, special) for each in value]
    if isinstance(value, dict):
        return {_signed_text(name, special): _signed(each, special) for name, each in value.items()}
    return value


def _signed_text(value: str, special: _Special) -> str:
    text, count = value.replace(SIGN, ""), 1
    while count:  # Names may overlap: cutting one name may leave another name whole.
        text, count = special.whole.subn(lambda found: f"{found[0][0]}{SIGN}{found[0][1:]}", text)
    stripped = text.strip()  # A template may strip texts.
    if any(stripped[-size:] in special.beginnings for size in special.sizes):
        place = len(text.rstrip())
        text = f"{text[:place]}{SIGN}{text[place:]}"
    if stripped in special.middles or any(stripped[:size] in special.ends for size in special.sizes):
        place = len(text) - len(text.lstrip())
        text = f"{text[:place]}{SIGN}{text[place:]}"
    return text


class ChatTemplate:
    """The templates of one checkpoint; most checkpoints have one.

    Attributes:
        sources: texts of the templates, by name: `default`, and `tool_use` if there is a separate one for tools.
        variables: the tokenizer's special tokens; every template may use them.
        file: the file that holds the templates; empty if there is none.
        unreadable: descriptions of files that should hold templates and cannot be read.
    """

    def __init__(
        self, sources: Mapping[str, str], variables: Mapping[str, Any], file: str = "", unreadable: Sequence[str] = ()
    ) -> None:
        self.sources, self.variables = dict(sources), dict(variables)
        self.file, self.unreadable = file, tuple(unreadable)

    def faults(self) -> list[str]:
        """Returns the syntax errors of the templates and the faults of their files, as texts."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        found = list(self.unreadable)
        where = f"{self.file}: " if self.file else ""
        for name, source in self.sources.items():
            try:
                _compile_jinja_template(source)
            except jinja2.TemplateSyntaxError as error:
                found.append(f"{where}template {name!r}, line {error.lineno}: {error.message}")
        return found

    def text(self, conversation: Conversation) -> str:
        """Renders a conversation.

        The template gets each content as one text, or as a list of parts if it ignores contents that are texts.

        Raises:
            ConversationError: there is no template, or it refuses the conversation.
            TemplateError: the checkpoint's template has a syntax error.
        """
        source = self._source(conversation)
        tried = conversation._replace(continues_final=False)
        bare = Conversation([], [], {}, with_generation_prompt=False)
        try:
            messages = fitted(
                conversation.messages,
                lambda others: self._rendered(source, tried._replace(messages=others)),
                lambda others: self._rendered(source, bare._replace(messages=others)),
            )
            return self._rendered(source, conversation._replace(messages=messages))
        except jinja2.TemplateSyntaxError as error:
            what = f"has a syntax error in line {error.lineno}"
            if conversation.template:
                raise ConversationError(f"chat_template {what}", "chat_template") from None
            raise TemplateError(f"the chat template {what}") from None
        except jinja2.TemplateError as error:
            raise ConversationError(f"the chat template rejects this conversation: {error}") from None
        except MemoryError:
            raise
        except Exception as error:  # a template's operators raise the exceptions of Python's operators
            raise ConversationError(f"the chat template fails on this conversation: {type(error).__name__}") from None

    def _source(self, conversation: Conversation) -> str:
        if conversation.template:
            return conversation.template
        name = "tool_use" if conversation.tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ConversationError("the checkpoint has no chat template")
        return self.sources[name]

    def _rendered(self, source: str, conversation: Conversation) -> str:
        try:
            return self._written(source, conversation)
        except TypeError:  # some templates concatenate a call's arguments with a text: retry with arguments as text
            messages = [_with_written_arguments(message) for message in conversation.messages]
            return self._written(source, conversation._replace(messages=messages))

    def _written(self, source: str, conversation: Conversation) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [
            {name: value for name, value in message.items() if value is not None} for message in conversation.messages
        ]
        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=[*conversation.tools] or None,
            chat_template=source,
            add_generation_prompt=conversation.with_generation_prompt,
            continue_final_message=conversation.continues_final,
            **{**self.variables, **conversation.variables},
        )
        return str(rendered[0][0])


def _with_written_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message in which the arguments of calls are JSON texts instead of objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    written = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            written.append({**call, "function": {**function, "arguments": text}})
        else:
            written.append(call)
    return {**message, "tool_calls": written}


def chat_template_of(tokenizer: PreTrainedTokenizerBase, folder: Path) -> ChatTemplate:
    """Returns the templates of a checkpoint: the tokenizer's, or else the processor's.

    A file that exists and cannot be read is among their faults.
    """
    own, sources, file, unreadable = _file_of_tokenizer(folder), dict[str, str](), "", []
    for name in (own, "chat_template.json", "processor_config.json"):
        if sources:
            break
        file = name
        try:
            is_own = name == own
            found = tokenizer.chat_template if is_own else json.loads((folder / name).read_text(encoding="utf-8"))
            sources = _sources(found if is_own else found.get("chat_template"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not JSON with templates as strings"
            unreadable.append(f"{name}: {why}")
    if len(sources) == 1:
        sources = {"default": next(iter(sources.values()))}
    return ChatTemplate(sources, tokenizer.special_tokens_map, file if sources else "", unreadable)


def _file_of_tokenizer(folder: Path) -> str:
    """Returns the name of the file that transformers reads a tokenizer's templates from, if it has any."""
    if (folder / "additional_chat_templates").is_dir():
        return "chat_template.jinja or additional_chat_templates"
    return "chat_template.jinja" if (folder / "chat_template.jinja").exists() else "tokenizer_config.json"


def _sources(found: Any) -> dict[str, str]:
    """Returns templates by name. The input is one template, a mapping by name, or a list as in older files.

    Raises:
        TypeError, KeyError: the input has another form.
    """
    if found is None or isinstance(found, str):
        return {"default": found} if found else {}
    sources = {each["name"]: each["template"] for each in found} if isinstance(found, list) else dict(found)
    if not all(isinstance(part, str) for item in sources.items() for part in item):
        raise TypeError("a chat template must be a string")
    return sources
