"""Digests: the vectors of docs/hash.md, an independent computation, and what a digest must depend on."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.hashing import DIGEST_BYTES, block_digests, prompt_digests, root_digest, split_digests

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hash.md"
ROOT = root_digest(fingerprint=b"model", layout="nhd")


def read_vectors() -> dict[str, dict[str, str]]:
    """Title of each vector and its fields, as they stand on the page."""
    section = PAGE.read_text(encoding="utf-8").split("## Test vectors")[1]
    vectors = {}
    for title, body in re.findall(r"### (.+?)\n\n```text\n(.+?)```", section, re.DOTALL):
        fields = (line.partition("=") for line in body.strip().splitlines())
        vectors[title] = {name.strip(): value.strip() for name, _, value in fields}
    return vectors


VECTORS = read_vectors()


def extra_keys_of(vector: dict[str, str]) -> list[list[bytes]]:
    if "extra_keys" not in vector:
        return []
    blocks = vector["extra_keys"].split("|")
    return [[bytes.fromhex(key.replace("(empty)", "")) for key in block.split()] for block in blocks]


def digests_of(vector: dict[str, str]) -> list[str]:
    return [value for name, value in vector.items() if name.startswith("digest_")]


def test_the_page_has_its_vectors() -> None:
    assert len(VECTORS) == 6
    assert sum(len(digests_of(vector)) for vector in VECTORS.values()) == 12


@pytest.mark.parametrize("title", VECTORS)
def test_the_library_computes_the_vectors_of_the_page(title: str) -> None:
    vector = VECTORS[title]
    root = root_digest(
        fingerprint=bytes.fromhex(vector["fingerprint"]),
        layout=vector["layout"],
        lora=vector["lora"],
        namespace=vector["namespace"],
    )
    assert root.hex() == vector["root"]
    tokens = list(map(int, vector["tokens"].split()))
    digests = block_digests(root, tokens, int(vector["block_size"]), extra_keys=extra_keys_of(vector) or None)
    assert [digest.hex() for digest in digests] == digests_of(vector)


@pytest.mark.parametrize("title", VECTORS)
def test_the_definition_of_the_page_gives_its_vectors(title: str) -> None:
    vector = VECTORS[title]

    def number(value: int) -> bytes:
        return (value % 2**32).to_bytes(4, "little")

    def sha256(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(parts)).digest()

    texts = [vector[name].encode() for name in ("layout", "lora", "namespace")]
    fields = [part for text in (bytes.fromhex(vector["fingerprint"]), *texts) for part in (number(len(text)), text)]
    parent = sha256(b"quire/1", *fields)
    assert parent.hex() == vector["root"]
    tokens, size = list(map(int, vector["tokens"].split())), int(vector["block_size"])
    extra = extra_keys_of(vector) or [[]] * len(tokens)
    for block, expected in enumerate(digests_of(vector)):
        keys = [part for key in extra[block] for part in (number(len(key)), key)]
        parent = sha256(parent, number(size), *map(number, tokens[block * size : (block + 1) * size]), *keys)
        assert parent.hex() == expected
    assert len(tokens) // size == len(digests_of(vector))


@pytest.mark.parametrize("changed", ["fingerprint", "layout", "lora", "namespace"])
def test_the_root_depends_on_everything_it_is_derived_from(changed: str) -> None:
    fields: dict[str, Any] = {"fingerprint": b"a", "layout": "b", "lora": "c", "namespace": "d"}
    other = {**fields, changed: b"x" if changed == "fingerprint" else "x"}
    assert root_digest(**fields) != root_digest(**other)


def test_text_cannot_move_from_one_field_of_the_root_into_the_next() -> None:
    assert root_digest(fingerprint=b"", layout="ab", lora="c") != root_digest(fingerprint=b"", layout="a", lora="bc")


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(1, 9), st.integers(0, 40))
def test_a_chain_may_be_continued_from_any_of_its_blocks(tokens: list[int], block_size: int, cut: int) -> None:
    whole = block_digests(ROOT, tokens, block_size)
    assert len(whole) == len(tokens) // block_size
    done = min(cut, len(whole))
    parent = whole[done - 1] if done else ROOT
    assert block_digests(parent, tokens[done * block_size :], block_size) == whole[done:]


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(0, 7))
def test_a_token_changes_the_digest_of_its_block_and_of_all_after_it_and_of_none_before(
    tokens: list[int], index: int
) -> None:
    other = [*tokens[:index], tokens[index] + 1, *tokens[index + 1 :]]
    equal = [a == b for a, b in zip(block_digests(ROOT, tokens, 2), block_digests(ROOT, other, 2), strict=True)]
    assert equal == [block < index // 2 for block in range(4)]


def test_extra_keys_are_told_apart_however_they_are_cut() -> None:
    chains = [block_digests(ROOT, [1, 2], 2, extra_keys=[keys]) for keys in ([], [b""], [b"ab"], [b"a", b"b"])]
    assert len({chain[0] for chain in chains}) == 4


@pytest.mark.parametrize(("token_count", "digest_count"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_prompt_shares_full_blocks_but_leaves_a_token_to_compute(token_count: int, digest_count: int) -> None:
    tokens = list(range(token_count))
    assert prompt_digests(ROOT, tokens, 4) == block_digests(ROOT, tokens, 4)[:digest_count]


def test_digests_do_not_depend_on_the_process() -> None:
    script = "from quire.hashing import *; print(root_digest(fingerprint=b'model', layout='nhd').hex())"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
        assert done.stdout.decode().strip() == ROOT.hex()


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_beyond_32_bits_is_refused(token: int) -> None:
    with pytest.raises(OverflowError, match="32-bit"):
        block_digests(ROOT, [token], 1)


def test_a_root_of_another_length_and_a_block_size_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        block_digests(b"short", [1], 1)
    with pytest.raises(ValueError, match="at least 1"):
        block_digests(ROOT, [1], 0)


def test_concatenated_digests_are_split_again_and_a_remainder_is_refused() -> None:
    digests = block_digests(ROOT, [1, 2, 3], 1)
    assert split_digests(b"".join(digests)) == digests
    assert split_digests(b"") == []
    with pytest.raises(ValueError, match="multiple of 32"):
        split_digests(bytes(DIGEST_BYTES + 1))
