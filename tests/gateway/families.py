"""Makes tiny checkpoints that write like model families: the demo model with a family's tokens and template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.gateway.scene import DEMO


class Family(NamedTuple):
    """The notation of a family of models.

    Attributes:
        template: the chat template.
        special: special tokens, which are no part of a text.
        ordinary: added tokens that are part of a text.
        calls: name of the format of its tool calls.
        reasoning: name of the format of its reasoning.
    """

    template: str
    special: Sequence[str]
    ordinary: Sequence[str]
    calls: str
    reasoning: str = "none"


def _chatml(call: str, *, before: str = "", prompt: str = "") -> str:
    """Returns a template that marks messages as Qwen's template does."""
    return (
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
        "<|im_end|>\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        + before
        + "{{ message.content }}{% for call in message.tool_calls %}"
        + call
        + "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        + prompt
        + "{% endif %}"
    )


_HERMES: Final = (
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
)
_LLAMA: Final = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL: Final = (
    "<s>{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{{ call.function | tojson | trim(\'}\') }}}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}'
    "{% endfor %}]</s>{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
_MISTRAL_V11: Final = (
    "<s>{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% elif message.tool_calls %}{% for call in message.tool_calls %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)


def _deepseek(call: str, prompt: str) -> str:
    return (
        "{% for message in messages %}{% if message.role == 'user' %}<｜User｜>{{ message.content }}"
        "{% elif message.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for call in message.tool_calls %}"
        "<｜tool▁call▁begin｜>" + call + "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "{% else %}<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>" + prompt + "{% endif %}"
    )


_GRANITE: Final = (
    "{% for message in messages %}<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}"
    "{% if message.tool_calls %}<|tool_call|>[{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
_KIMI: Final = _chatml(
    "{% if loop.first %}<|tool_calls_section_begin|>{% endif %}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>"
    "{% if loop.last %}<|tool_calls_section_end|>{% endif %}"
)
_HARMONY: Final = (
    "{% for message in messages %}{% if message.tool_calls %}"
    "<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ message.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_DEEPSEEK_TOKENS: Final = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
_THINKS: Final = (
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}",
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
)
FAMILIES: Final = {
    "qwen2": Family(_chatml(_HERMES), ["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"], "hermes"),
    "qwen3": Family(
        _chatml(_HERMES, before=_THINKS[0], prompt=_THINKS[1]),
        ["<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<think>", "</think>"],
        "hermes",
        "think",
    ),
    "qwq": Family(
        _chatml(_HERMES, prompt="<think>\n"),
        ["<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<think>", "</think>"],
        "hermes",
        "think",
    ),
    "llama3": Family(
        _LLAMA, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"], [], "llama3_json"
    ),
    "mistral": Family(_MISTRAL, ["[INST]", "[/INST]", "[TOOL_CALLS]"], [], "mistral"),
    "mistral_v11": Family(_MISTRAL_V11, ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"], [], "mistral_v11"),
    "deepseek_v3": Family(  # This family's template writes a call's arguments as plain text.
        _deepseek(
            "function<｜tool▁sep｜>{{ call.function.name }}\n```json\n{{ '' + call.function.arguments }}\n```", ""
        ),
        [],
        _DEEPSEEK_TOKENS,
        "deepseek_v3",
    ),
    "deepseek_v31": Family(
        _deepseek("{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}", "</think>"),
        [],
        [*_DEEPSEEK_TOKENS, "<think>", "</think>"],
        "deepseek_v31",
        "think",
    ),
    "granite": Family(_GRANITE, ["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"], [], "granite"),
    "kimi_k2": Family(
        _KIMI,
        [
            *("<|im_start|>", "<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ],
        [],
        "kimi_k2",
    ),
    "gpt_oss": Family(
        _HARMONY,
        ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"],
        [],
        "openai",
    ),
    "chatml": Family(_chatml(""), ["<|im_start|>", "<|im_end|>"], [], "none"),
}


def write_family(folder: Path, family: Family) -> Path:
    """Writes the checkpoint of a family into a new folder. Its tokens replace the demo model's rarest ones."""
    shutil.copytree(DEMO, folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    model, names = described["model"], [*family.special, *family.ordinary]
    rarest = sorted(model["vocab"], key=model["vocab"].get)[-len(names) :] if names else []
    merges = [each if isinstance(each, list) else each.split(" ") for each in model["merges"]]
    gone = set(rarest)
    model["merges"] = [each for each in merges if not gone & {*each, "".join(each)}]
    for name, old in zip(names, rarest, strict=True):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": model["vocab"].pop(old), "content": name, **flags, "special": name in family.special}
        described["added_tokens"].append(token)
    described["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text(family.template)
    return folder
