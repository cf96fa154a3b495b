"""Tests digests against the vectors of docs/hash.md and an independent computation, and with inputs that must change
them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.hashing import (
    DIGEST_BYTES,
    DigestChain,
    MultimodalItem,
    block_digests,
    block_digests_bytes,
    multimodal_keys,
    prompt_digests,
    root_digest,
    split_digests,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hash.md"
ROOT = root_digest(fingerprint=b"model", layout="nhd")

# Reads the vectors as JSON, and prints [[root, [extra keys of a block, ...], [digest, ...]], ...] in hexadecimal.
JAVASCRIPT = """
const sha256 = (bytes) => require("crypto").createHash("sha256").update(bytes).digest();
const int32 = (value) => { const bytes = Buffer.alloc(4); bytes.writeInt32LE(value | 0); return bytes; };
const field = (bytes) => Buffer.concat([int32(bytes.length), bytes]);
const words = (text) => text.split(" ").filter((word) => word);
const key = (block, size, [id, first, count]) =>
  Buffer.concat([Buffer.from("mm/1"), int32(first - block * size), int32(count), Buffer.from(id, "hex")]);
const chain = (vector) => {
  const size = Number(vector.block_size), tokens = words(vector.tokens).map(Number);
  const coded = [["fingerprint", "hex"], ["layout", "utf8"], ["adapter", "hex"], ["namespace", "utf8"]];
  const fields = coded.map(([name, code]) => field(Buffer.from(vector[name], code)));
  const root = sha256(Buffer.concat([Buffer.from("quire/2"), ...fields]));
  let hashed = Buffer.concat([root, int32(size)]);
  const items = (vector.items || "").split("|").map(words).filter((item) => item.length);
  const given = (vector.extra_keys || "").split("|").map(words);
  const keys = [], digests = [];
  for (let block = 0; (block + 1) * size <= tokens.length; block++) {
    const inside = ([, first, count]) => first < (block + 1) * size && Number(first) + Number(count) > block * size;
    keys.push(items.length ? items.filter(inside).map((item) => key(block, size, item))
      : (given[block] || []).map((text) => Buffer.from(text === "(empty)" ? "" : text, "hex")));
    const numbers = tokens.slice(block * size, (block + 1) * size).map(int32);
    if (keys[block].length) {
      const parts = [Buffer.from("quire/2/keys"), digests[block - 1] || root, ...keys[block].map(field)];
      hashed = Buffer.concat([sha256(Buffer.concat(parts)), int32(size)]);
    }
    hashed = Buffer.concat([hashed, ...numbers]);
    digests.push(sha256(hashed));
  }
  const hex = (bytes) => bytes.toString("hex");
  return [hex(root), keys.map((of) => of.map(hex)), digests.map(hex)];
};
console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0, "utf8")).map(chain)));
"""


def read_vectors() -> dict[str, dict[str, str]]:
    """Returns the title and the fields of each vector on the page."""
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


def items_of(vector: dict[str, str]) -> list[MultimodalItem]:
    rows = (row.split() for row in vector.get("items", "").split("|") if row)
    return [MultimodalItem(bytes.fromhex(content_id), int(first), int(count)) for content_id, first, count in rows]


def digests_of(vector: dict[str, str]) -> list[str]:
    return [value for name, value in vector.items() if name.startswith("digest_")]


def test_the_page_has_its_vectors() -> None:
    assert len(VECTORS) == 10
    assert sum(len(digests_of(vector)) for vector in VECTORS.values()) == 24
    assert sum(len(items_of(vector)) for vector in VECTORS.values()) == 9


@pytest.mark.parametrize("title", VECTORS)
def test_the_library_computes_the_vectors_of_the_page(title: str) -> None:
    vector = VECTORS[title]
    root = root_digest(
        fingerprint=bytes.fromhex(vector["fingerprint"]),
        layout=vector["layout"],
        adapter=bytes.fromhex(vector["adapter"]),
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

    fingerprint, adapter = (bytes.fromhex(vector[name]) for name in ("fingerprint", "adapter"))
    fields = (fingerprint, vector["layout"].encode(), adapter, vector["namespace"].encode())
    parent = sha256(b"quire/2", *[part for field in fields for part in (number(len(field)), field)])
    assert parent.hex() == vector["root"]
    tokens, size = list(map(int, vector["tokens"].split())), int(vector["block_size"])
    extra = extra_keys_of(vector) or [[]] * len(tokens)
    start, first = parent, 0
    for block, expected in enumerate(digests_of(vector)):
        if extra[block]:
            keys = [part for key in extra[block] for part in (number(len(key)), key)]
            start, first = sha256(b"quire/2/keys", parent, *keys), block
        parent = sha256(start, number(size), *map(number, tokens[first * size : (block + 1) * size]))
        assert parent.hex() == expected
    assert len(tokens) // size == len(digests_of(vector))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, the second language")
def test_another_language_computes_the_vectors_of_the_page() -> None:
    done = subprocess.run(
        ["node", "-e", JAVASCRIPT], input=json.dumps(list(VECTORS.values())), capture_output=True, check=True, text=True
    )
    for vector, (root, keys, digests) in zip(VECTORS.values(), json.loads(done.stdout), strict=True):
        assert root == vector["root"]
        assert digests == digests_of(vector)
        expected = [[key.hex() for key in block] for block in extra_keys_of(vector)]
        assert keys == (expected or [[]] * len(digests))


@pytest.mark.parametrize("title", [title for title, vector in VECTORS.items() if "items" in vector])
def test_items_give_the_extra_keys_of_the_page_in_whatever_order_they_come(title: str) -> None:
    vector = VECTORS[title]
    token_count, size = len(vector["tokens"].split()), int(vector["block_size"])
    for items in (items_of(vector), items_of(vector)[::-1]):
        assert [list(keys) for keys in multimodal_keys(items, token_count, size)] == extra_keys_of(vector)


def test_the_root_depends_on_everything_it_is_derived_from() -> None:
    fields: dict[str, Any] = {"fingerprint": b"a", "layout": "b", "adapter": b"c" * 32, "namespace": "d"}
    others: dict[str, Any] = {"fingerprint": b"x", "layout": "x", "adapter": b"x" * 32, "namespace": "x"}
    assert (
        len({root_digest(**{**fields, name: value}) for name, value in others.items()} | {root_digest(**fields)}) == 5
    )


def test_bytes_cannot_move_from_one_field_of_the_root_into_the_next() -> None:
    assert root_digest(fingerprint=b"ab", layout="c") != root_digest(fingerprint=b"a", layout="bc")


def test_an_adapter_that_is_loaded_again_under_its_name_with_other_weights_shares_nothing_with_the_old_one() -> None:
    adapters = [hashlib.sha256(weights).digest() for weights in (b"first training", b"second training")]
    roots = [root_digest(fingerprint=b"model", layout="nhd", adapter=adapter) for adapter in adapters]
    assert len({ROOT, *roots}) == 3


@pytest.mark.parametrize("adapter", [b"polite", b"\0" * 31, b"\0" * 33])
def test_a_name_in_place_of_the_digest_of_an_adapter_is_refused(adapter: bytes) -> None:
    with pytest.raises(ValueError, match=f"SHA-256 of the adapter's weights, 32 bytes, or empty, not {len(adapter)}"):
        root_digest(fingerprint=b"model", layout="nhd", adapter=adapter)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(1, 9), st.integers(0, 40))
def test_a_chain_may_be_continued_from_any_of_its_blocks(tokens: list[int], block_size: int, cut: int) -> None:
    whole = block_digests(ROOT, tokens, block_size)
    assert len(whole) == len(tokens) // block_size
    done = min(cut, len(whole)) * block_size
    end = len(whole) * block_size
    chain = DigestChain(ROOT, block_size)
    first = chain.extend(tokens[:done])
    fork = chain.copy()
    assert first + chain.extend(tokens[done:end]) == whole
    assert first + fork.extend(tokens[done:end]) == whole


@given(st.lists(st.lists(st.binary(max_size=2), max_size=2), min_size=1, max_size=9), st.integers(0, 9))
def test_a_chain_with_extra_keys_may_be_continued_from_any_of_its_blocks(keys: list[list[bytes]], cut: int) -> None:
    tokens = list(range(2 * len(keys)))
    whole = block_digests(ROOT, tokens, 2, extra_keys=keys)
    chain = DigestChain(ROOT, 2)
    first = chain.extend(tokens[: 2 * cut], extra_keys=keys[:cut])
    fork = chain.copy()
    assert first + chain.extend(tokens[2 * cut :], extra_keys=keys[cut:]) == whole
    assert first + fork.extend(tokens[2 * cut :], extra_keys=keys[cut:]) == whole


def test_a_chain_takes_whole_blocks_only_and_is_left_alone_by_what_it_refuses() -> None:
    chain = DigestChain(ROOT, 2)
    with pytest.raises(ValueError, match="must be a multiple of the block size 2, not 3"):
        chain.extend([1, 2, 3])
    with pytest.raises(ValueError, match="entry for each of the 2 full blocks, not 1"):
        chain.extend([1, 2, 3, 4], extra_keys=[[b"x"]])
    with pytest.raises(OverflowError, match="32-bit"):
        chain.extend([1, 2, 3, 2**31])
    assert chain.extend([1, 2]) == block_digests(ROOT, [1, 2], 2)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.binary(max_size=1), max_size=2)), max_size=4),
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.binary(max_size=1), max_size=2)), max_size=4),
)
def test_two_prompts_share_a_digest_only_where_tokens_and_keys_agree_so_far(
    one: list[tuple[int, list[bytes]]], two: list[tuple[int, list[bytes]]]
) -> None:
    chains = []
    for prompt in (one, two):
        digests = block_digests(ROOT, [token for token, _ in prompt], 1, extra_keys=[keys for _, keys in prompt])
        assert len(set(digests)) == len(digests)
        chains.append(digests)
    for i, first in enumerate(chains[0]):
        for j, second in enumerate(chains[1]):
            assert (first == second) == (i == j and one[: i + 1] == two[: j + 1])


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
    with pytest.raises(ValueError, match="an integer from 1"):
        block_digests(ROOT, [1], 0)


def test_concatenated_digests_are_split_again_and_a_remainder_is_refused() -> None:
    digests = block_digests(ROOT, [1, 2, 3], 1)
    assert split_digests(b"".join(digests)) == digests
    assert split_digests(b"") == []
    with pytest.raises(ValueError, match="multiple of 32"):
        split_digests(bytes(DIGEST_BYTES + 1))


def test_digests_come_concatenated_too() -> None:
    keys = [[b"a"], [], [b"b", b""]]
    assert block_digests_bytes(ROOT, range(7), 2) == b"".join(block_digests(ROOT, range(7), 2))
    assert split_digests(block_digests_bytes(ROOT, range(7), 2, extra_keys=keys)) == block_digests(
        ROOT, range(7), 2, extra_keys=keys
    )
    assert block_digests_bytes(ROOT, [1], 2) == b""


@pytest.mark.parametrize("typecode", "bhilqBHILQ")
def test_tokens_may_come_as_an_array_of_any_integers(typecode: str) -> None:
    tokens = list(range(100, 117))
    expected = block_digests(ROOT, tokens, 4)
    values = array(typecode, tokens)
    for same in (values, memoryview(values), tuple(tokens), range(100, 117)):
        assert block_digests(ROOT, same, 4) == expected


@pytest.mark.parametrize("token_count", [2047, 2048, 2049, 4096, 5000])
def test_prompts_of_thousands_of_tokens_come_out_the_same_from_a_list_and_from_memory(token_count: int) -> None:
    tokens = [token * 7919 % 150_000 for token in range(token_count)]
    assert block_digests(ROOT, tokens, 16) == block_digests(ROOT, array("i", tokens), 16)


def test_tokens_may_come_from_numpy_strided_or_in_the_other_byte_order() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is an extra")
    tokens = list(range(-3, 30))
    for dtype in ("<i4", ">i4", "<i8", "<i2"):
        values = numpy.array(tokens, dtype)
        assert block_digests(ROOT, values, 4) == block_digests(ROOT, tokens, 4)
        assert block_digests(ROOT, values[::-2], 4) == block_digests(ROOT, tokens[::-2], 4)


def test_an_array_of_unsigned_tokens_beyond_32_bits_is_refused_rather_than_wrapped() -> None:
    with pytest.raises(OverflowError, match="32-bit"):
        block_digests(ROOT, array("I", [2**31]), 1)


def test_extra_keys_for_fewer_blocks_than_are_full_are_refused_and_more_are_not_looked_at() -> None:
    with pytest.raises(ValueError, match="entry for each of the 2 full blocks, not 1"):
        block_digests(ROOT, [1, 2], 1, extra_keys=[[]])
    keys = [[b"x"], [b"y"], [b"z"]]
    assert prompt_digests(ROOT, [1, 2, 3], 1, extra_keys=keys) == block_digests(ROOT, [1, 2], 1, extra_keys=keys[:2])


def test_the_same_image_at_another_offset_among_equal_placeholders_gives_other_digests() -> None:
    chains = [
        block_digests(ROOT, [9] * 12, 4, extra_keys=multimodal_keys([item], 12, 4))
        for item in (
            MultimodalItem(b"cat", 4, 5),
            MultimodalItem(b"cat", 5, 5),
            MultimodalItem(b"cat", 4, 6),
            MultimodalItem(b"dog", 4, 5),
        )
    ]
    assert len({chain[0] for chain in chains}) == 1
    assert len({chain[1] for chain in chains}) == len({chain[2] for chain in chains}) == 4


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=5)


@given(spans, st.integers(1, 7), st.integers(0, 9))
def test_a_block_has_a_key_of_each_item_that_overlaps_it_and_of_no_other(
    gaps_and_lengths: list[tuple[int, int]], block_size: int, rest: int
) -> None:
    owner: list[MultimodalItem | None] = []
    for number, (gap, length) in enumerate(gaps_and_lengths):
        item = MultimodalItem(b"%d" % number, len(owner) + gap, length)
        owner += [None] * gap + [item] * length
    owner += [None] * rest
    items = {item: None for item in owner if item is not None}
    keys = multimodal_keys(items, len(owner), block_size)
    assert len(keys) == len(owner) // block_size
    for block, of_block in enumerate(keys):
        inside = owner[block * block_size : (block + 1) * block_size]
        expected = list(dict.fromkeys(item for item in inside if item is not None))
        assert [key[12:] for key in of_block] == [item.content_id for item in expected]
        starts = [block * block_size + int.from_bytes(key[4:8], "little", signed=True) for key in of_block]
        assert starts == [item.first_token for item in expected]


@pytest.mark.parametrize(
    ("content_id", "first_token", "token_count", "message"),
    [
        (b"", 0, 1, "content_id must be 1 to 128 bytes, not 0"),
        (bytes(129), 0, 1, "content_id must be 1 to 128 bytes, not 129"),
        (b"x", -1, 1, "first_token must be an integer from 0"),
        (b"x", 0, 0, "token_count must be an integer from 1"),
        (b"x", 3, -2, "token_count must be an integer from 1"),
    ],
)
def test_an_item_out_of_range_is_refused(content_id: bytes, first_token: int, token_count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultimodalItem(content_id, first_token, token_count)


def test_items_that_overlap_or_reach_beyond_the_prompt_are_refused() -> None:
    first, second = MultimodalItem(b"a", 2, 3), MultimodalItem(b"b", 4, 2)
    with pytest.raises(ValueError, match="the item at token 4 overlaps the one at 2"):
        multimodal_keys([second, first], 8, 4)
    with pytest.raises(ValueError, match="overlaps"):
        multimodal_keys([first, first], 8, 4)
    with pytest.raises(ValueError, match="the item at token 4 ends beyond the 5 tokens of the prompt"):
        multimodal_keys([second], 5, 4)
    with pytest.raises(ValueError, match="token_count must be an integer from 0 to"):
        multimodal_keys([], 2**31, 4)
    with pytest.raises(ValueError, match="block_size must be an integer from 1"):
        multimodal_keys([], 4, 0)
    assert multimodal_keys([second], 6, 4) == multimodal_keys([second], 7, 4)
