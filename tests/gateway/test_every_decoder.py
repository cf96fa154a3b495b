"""Texts, streams, logprobs and offsets agree for tokenizers of every kind, over a worker and a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
import torch
from quire.local import LocalStack
from quire_worker.model.tokenizer import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.built_tokenizers import built

KINDS = ("llama_2", "word_ends", "word_piece", "ctc", "metaspace", "byte_level_stripped")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Scene(NamedTuple):
    """A served model, and the facts about its tokenizer."""

    ai: openai.OpenAI
    tokenizer: Tokenizer
    ordinary: list[int]  # ids of all tokens that are not special


@pytest.fixture(scope="module", params=KINDS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    tokenizer, backend = built(request.param, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    LlamaForCausalLM(LlamaConfig(vocab_size=backend.get_vocab_size(), **sizes, **heads)).save_pretrained(folder)
    ordinary = [token for token in range(backend.get_vocab_size()) if token not in tokenizer.special_ids]
    with LocalStack(folder, worker_arguments=["--blocks", "64"], gateway_listen="127.0.0.1:0") as stack:
        assert stack.gateway_address is not None
        yield Scene(openai.OpenAI(base_url=f"http://{stack.gateway_address}/v1", api_key="-"), tokenizer, ordinary)


def asked(scene: Scene, **options: Any) -> dict[str, Any]:
    further = {"ignore_eos": True, "allowed_token_ids": scene.ordinary}
    return {"model": "model", "max_tokens": 24, "seed": 5, "temperature": 2.0, "extra_body": further, **options}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["the hello", "a", [], [1]])
def test_tokens_of_a_completion_are_its_text_and_offsets_are_places_in_it(
    scene: Scene, prompt: str | list[int], echo: bool
) -> None:
    given = prompt if isinstance(prompt, str) else [1, *prompt, *scene.ordinary[3:5]]
    call = asked(scene, prompt=given, logprobs=3, echo=echo)
    choice = scene.ai.completions.create(**call).choices[0]
    told = choice.logprobs
    assert told is not None
    assert told.tokens
    assert told.text_offset
    assert told.top_logprobs
    special = set(scene.tokenizer.special)
    shown = [token for token in told.tokens if token not in special or (echo and not isinstance(given, str))]
    if isinstance(given, str) and scene.tokenizer.decode(scene.tokenizer.encode(given)) != given:
        return  # The tokenizer cannot represent this text.
    if "\N{REPLACEMENT CHARACTER}" not in choice.text:
        assert "".join(shown) == choice.text
    for token, offset, top in zip(told.tokens, told.text_offset, told.top_logprobs, strict=True):
        if token not in special and "\N{REPLACEMENT CHARACTER}" not in token:
            assert choice.text[offset : offset + len(token)] == token
        assert top is None or token in top
    pieces = [piece.choices[0] for piece in scene.ai.completions.create(**call, stream=True)]
    assert "".join(piece.text for piece in pieces) == choice.text
    streamed = [each for piece in pieces if piece.logprobs for each in piece.logprobs.tokens or []]
    assert streamed == told.tokens
    assert [o for piece in pieces if piece.logprobs for o in piece.logprobs.text_offset or []] == told.text_offset


@pytest.mark.parametrize("content", ["the hello", "for"])
def test_bytes_of_a_chats_tokens_are_its_content(scene: Scene, content: str) -> None:
    call = asked(scene, messages=[{"role": "user", "content": content}], logprobs=True, top_logprobs=2)
    choice = scene.ai.chat.completions.create(**call).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    data = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert data.decode(errors="replace") == choice.message.content
    pieces = [piece.choices[0] for piece in scene.ai.chat.completions.create(**call, stream=True) if piece.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
    streamed = [each for piece in pieces if piece.logprobs for each in piece.logprobs.content or []]
    assert streamed == choice.logprobs.content


def test_tokens_become_text_again(scene: Scene) -> None:
    client = scene.ai._client
    base = str(scene.ai.base_url).removesuffix("/v1/")
    tokens = client.post(f"{base}/tokenize", json={"prompt": "the hello for", "return_token_strs": True}).json()
    text = scene.tokenizer.decode(tokens["tokens"], keeps_special=True)
    assert "".join(tokens["token_strs"]) == text
    assert client.post(f"{base}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == text
