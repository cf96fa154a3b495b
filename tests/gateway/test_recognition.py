"""The gateway recognizes each family's notation of calls and reasoning by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from quire import AsyncClient
from quire.errors import InternalError, QuireError, Reason, UnavailableError
from quire_gateway.calls.formats import CALL_FORMATS, REASONING_FORMATS
from quire_gateway.calls.recognition import Named, recognize
from quire_gateway.options import named_notation, parse_arguments

from tests.gateway.families import FAMILIES, write_family

pytest.importorskip("transformers")
conversation = pytest.importorskip("quire_worker.model.conversation")
tokenizer = pytest.importorskip("quire_worker.model.tokenizer")


class Local:
    """Answers as a worker does about texts and tokens, without a process."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = tokenizer.Tokenizer(folder)
        self.asked_count = 0

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        with_generation_prompt: bool = True,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        assert timeout_s
        self.asked_count += 1
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        given = conversation.read_conversation(
            json.dumps(prompt),
            json.dumps([*tools]),
            json.dumps(variables or {}),
            with_generation_prompt=with_generation_prompt,
        )
        try:
            text = self.tokenizer.chat_template.text(self.tokenizer.sign(given))
        except conversation.ConversationError as error:
            raise QuireError.of(Reason.BAD_PARAMETER, str(error), field=error.field) from None
        return tuple(self.tokenizer.encode_written(text))

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        assert timeout_s
        return tuple(self.tokenizer.spell(token_ids))


async def recognized(folder: Path, named: Named = Named()) -> Any:  # noqa: B008 - a value
    return await recognize(cast("AsyncClient", Local(folder)), named, timeout_s=1)


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_family_is_known_by_what_its_template_makes_of_a_call(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    found = await recognized(write_family(tmp_path / name, family))
    assert (found.calls, found.reasoning) == (family.calls, family.reasoning)
    assert found.notation.calls is CALL_FORMATS.get(family.calls)
    assert found.notation.reasoning is REASONING_FORMATS.get(family.reasoning)
    tokens = tokenizer.Tokenizer(tmp_path / name).vocabulary()
    written = [*family.special, *family.ordinary]
    assert found.notation.tokens == {text: tokens[text] for text in found.notation.tokens}
    assert {text for text in written if "tool" in text or "TOOL" in text or "think" in text} <= {
        *found.notation.tokens,
        *(("<think>", "</think>") if family.reasoning == "none" else ()),
    }


async def test_options_name_a_notation_or_say_that_there_is_none(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "folder", FAMILIES["qwen3"])
    found = await recognized(folder, Named("mistral", "none"))
    assert (found.notation.calls, found.notation.reasoning) == (CALL_FORMATS["mistral"], None)
    found = await recognized(folder, Named("none", "auto"))
    assert (found.notation.calls, found.reasoning) == (None, "think")


async def test_a_template_that_refuses_says_nothing_and_a_worker_that_is_away_is_asked_again(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "folder", FAMILIES["chatml"])
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    found = await recognized(folder)
    assert (found.calls, found.reasoning) == ("none", "none")

    class Broken(Local):
        async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> tuple[bytes, ...]:
            raise InternalError("broken")

    found = await recognize(cast("AsyncClient", Broken(folder)), Named(), timeout_s=1)
    assert (found.calls, found.notation.tokens) == ("none", {})

    class Away(Local):
        async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> tuple[bytes, ...]:
            raise UnavailableError("away")

    (folder / "chat_template.jinja").write_text(FAMILIES["chatml"].template)
    with pytest.raises(UnavailableError):
        await recognize(cast("AsyncClient", Away(folder)), Named(), timeout_s=1)


def test_a_format_named_for_a_model_counts_before_that_for_all_models() -> None:
    names = ["--tool-call-format", "hermes", "--reasoning-format", "think"]
    options = parse_arguments([*names, "--tool-call-format", "a=none", "--reasoning-format", "a=none"])
    named = [named_notation(options, model) for model in ("a", "b")]
    assert named == [Named("none", "none"), Named("hermes", "think")]
    assert named_notation(parse_arguments([]), "a") == Named("auto", "auto")
