"""Plans layouts from layers: compares them with scenarios counted by hand, and with a naive model of a sequence's
blocks."""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from quire import planning
from quire.planning import Family, LayerSpec, Layout, full_attention_bytes, lengths_up_to, plan_layout
from quire.planning.dividing import Divisions, divided
from quire.planning.specs import STATE_ALIGNMENT_BYTES
from quire.types import GroupKind

FULL, SLIDING, CHUNKED, STATE = (
    GroupKind.FULL_ATTENTION,
    GroupKind.SLIDING_WINDOW,
    GroupKind.CHUNKED_LOCAL,
    GroupKind.STATE,
)
# Keys and values of one KV head of 64 bf16 elements: 256 bytes a token, 4,096 bytes a layer in a block of 16 tokens.
SLOT = 4_096


class Kind(NamedTuple):
    """Layers of one spec; `window` is the size in bytes for states."""

    kind: GroupKind
    count: int
    window: int = 0
    heads: int = 1


def layers_of(*kinds: Kind) -> tuple[LayerSpec, ...]:
    made: list[LayerSpec] = []
    for kind, count, window, heads in kinds:
        for _ in range(count):
            if kind is STATE:
                made.append(LayerSpec(len(made), kind, state_bytes=window))
            else:
                made.append(LayerSpec(len(made), kind, kv_head_count=heads, head_dim=64, window=window))
    return tuple(made)


class Scenario(NamedTuple):
    """Layers, and their layout as computed by hand."""

    kinds: tuple[Kind, ...]
    groups: tuple[tuple[int, int, int], ...]  # of each family: number of groups, layers per group, tokens per block
    page_bytes: int
    buffer_count: int
    padding: float  # share of padding at 256 tokens, where every group holds the same number of bytes


SCENARIOS = {
    # 20 window layers and 10 full layers are 2 : 1, so each group has 10 layers: 1 group of full attention, 2 of
    # sliding windows. This is the example of the reference.
    "a regular ratio": Scenario((Kind(FULL, 10), Kind(SLIDING, 20, 32)), ((1, 10, 16), (2, 10, 16)), 10 * SLOT, 10, 0),
    # Groups of 5: 10 full layers are 2 x 5, and 52 window layers are 11 x 5 - 3, so 3 of 13 x 5 = 65 slots stay empty.
    # Groups of 10 would leave 8 of 70 slots empty. Groups of 11 would waste one of 11 growing slots in long sequences.
    # Groups of 10 or 11 cost 5 % more bytes, and save 6 or 7 groups that are worth at most 3.5 %.
    "an irregular ratio": Scenario(
        (Kind(FULL, 10), Kind(SLIDING, 52, 1024)), ((2, 5, 16), (11, 5, 16)), 5 * SLOT, 5, 3 / 65
    ),
    # Speculative decoding adds a layer of full attention, which makes 11. 52 window layers are 5 x 11 - 3, so 3 of 66
    # slots stay empty.
    "one layer more": Scenario(
        (Kind(FULL, 11), Kind(SLIDING, 52, 1024)), ((1, 11, 16), (5, 11, 16)), 11 * SLOT, 11, 3 / 66
    ),
    # 20 full layers and 30 window layers are multiples of 10. Groups of 20, the smaller count, would leave 10 of 60
    # slots empty.
    "close counts": Scenario((Kind(FULL, 20), Kind(SLIDING, 30, 1024)), ((2, 10, 16), (3, 10, 16)), 10 * SLOT, 10, 0),
    "equal counts": Scenario((Kind(FULL, 12), Kind(SLIDING, 12, 128)), ((1, 12, 16), (1, 12, 16)), 12 * SLOT, 12, 0),
    "three kinds": Scenario(
        (Kind(FULL, 10), Kind(SLIDING, 20, 1024), Kind(CHUNKED, 10, 4096)),
        ((1, 10, 16), (2, 10, 16), (1, 10, 16)),
        10 * SLOT,
        10,
        0,
    ),
    # 5 full layers of 512 bytes a token fill a page with 16 tokens, and 5 window layers of 256 bytes with 32. Blocks of
    # 16 everywhere would halve the distance of edges, worth 1.7 %. But they would need 18 groups instead of 6, or leave
    # 5 of 30 window slots empty. Both options cost 5 % or more.
    "layers of two sizes": Scenario(
        (Kind(FULL, 5, heads=2), Kind(SLIDING, 25, 512)), ((1, 5, 16), (5, 5, 32)), 10 * SLOT, 5, 0
    ),
    # 6 full layers of 768 bytes a token take as much as 9 window layers of 512, so a page holds 6 or 9 layers. Each of
    # a page's 3 buffers holds 2 or 3 of them.
    "sizes in a ratio of three to two": Scenario(
        (Kind(FULL, 6, heads=3), Kind(SLIDING, 18, 512, heads=2)), ((1, 6, 16), (2, 9, 16)), 18 * SLOT, 3, 0
    ),
    # A page has 4 layers x 64 tokens x 256 bytes = 65,536 bytes. 28 states of 36,864 bytes fill 15.75 pages, so they
    # take 16: 4 pages hold 7 states. 256 tokens take 4 pages of attention and 16 of states, and a quarter of a page is
    # empty: 0.5 % on average. Pages a quarter as large would leave nothing empty, but need 63 groups of states: 47
    # more, each worth 1/20 of 0.5 %. A checkpoint of 16 pages is as large as 16 x 64 = 1,024 tokens.
    "states larger than a slot": Scenario(
        (Kind(FULL, 4), Kind(STATE, 28, 36_864)), ((1, 4, 64), (16, 7, 1024)), 65_536, 1, 0.25 / 20
    ),
    # A state is exactly as large as a page: there is one group per layer, and no state straddles pages.
    "states of one page": Scenario((Kind(FULL, 1), Kind(STATE, 3, 16_384)), ((1, 1, 64), (3, 1, 256)), 16_384, 1, 0),
    # One page of 49,152 bytes has 12 slots of 4,096 bytes; 10 states leave two slots empty. At 256 tokens a sequence
    # takes 16 pages of attention and 1 of states. In larger pages, more of the states' page would be empty.
    "small states": Scenario(
        (Kind(FULL, 12), Kind(STATE, 10, 4_096)), ((1, 12, 16), (1, 10, 256)), 12 * SLOT, 12, 2 / (12 * 17)
    ),
    "states alone": Scenario((Kind(STATE, 48, 10_240),), ((1, 48, 256),), 48 * 10_240, 48, 0),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_layers_are_grouped_as_worked_out_by_hand(scenario: Scenario) -> None:
    layout = plan_layout(layers_of(*scenario.kinds))
    assert tuple((f.group_count, f.layers_per_run, f.block_size) for f in layout.families) == scenario.groups
    assert (layout.page_bytes, layout.buffer_count) == (scenario.page_bytes, scenario.buffer_count)
    assert layout.slot_bytes * layout.buffer_count == layout.page_bytes
    assert layout.padding_share(256) == pytest.approx(scenario.padding)
    assert layout.padding_share_max(lengths_up_to(32_768)) < 0.05


def test_the_example_of_the_reference_holds_eleven_blocks() -> None:
    # Blocks have 16 tokens, the window 32, the sequence 112. Full attention takes 7 blocks. Each of the two window
    # groups takes the blocks of tokens 80 to 111.
    layout = plan_layout(layers_of(Kind(FULL, 10), Kind(SLIDING, 20, 32)))
    assert [family.block_count(112) for family in layout.families] == [7, 2]
    assert layout.blocks_needed(112) == 11
    assert [group.layers for group in layout.groups] == [tuple(range(i, i + 10)) for i in (0, 10, 20)]


def test_a_pass_over_many_tokens_keeps_what_its_first_one_attends_to() -> None:
    layout = plan_layout(layers_of(Kind(FULL, 1), Kind(SLIDING, 1, 32)))
    _, sliding = layout.families
    # the pass begins at token 48, which attends to tokens from 17 on, in blocks 1 to 6
    assert sliding.block_count(112, pass_token_count=64) == 6
    assert sliding.block_count(112, pass_token_count=112) == 7


def test_layers_that_share_anothers_keys_and_values_take_no_pages() -> None:
    own = layers_of(Kind(FULL, 4), Kind(SLIDING, 16, 512))
    sharing = tuple(
        LayerSpec(20 + i, SLIDING, kv_head_count=1, head_dim=64, window=512, shared_with=18) for i in range(15)
    )
    assert plan_layout(own + sharing) == plan_layout(own)
    assert full_attention_bytes(own + sharing, 100) == full_attention_bytes(own, 100) == 20 * 112 * 256


def test_a_latent_is_one_vector_for_all_heads() -> None:
    layer = LayerSpec(0, FULL, kv_head_count=1, head_dim=576, value_head_dim=0)
    assert layer.token_bytes == 1_152
    assert plan_layout([layer]).page_bytes == 18_432


def test_a_state_over_several_pages_is_cut_where_they_end() -> None:
    # 2 states of 40,192 bytes (40,000, aligned) take 5 pages of 16,384 bytes.
    layout = plan_layout(layers_of(Kind(FULL, 1), Kind(STATE, 2, 40_000)))
    first, second = (layer for layer in layout.slices() if layer.kind is STATE)
    assert layout.slices()[first] == ((1, 0, 16_384), (2, 0, 16_384), (3, 0, 7_232))
    assert layout.slices()[second] == ((3, 7_424, 8_960), (4, 0, 16_384), (5, 0, 14_656))
    assert [(group.layers, group.part, group.part_count) for group in layout.groups[1:]] == [
        ((1, 2), part, 5) for part in range(5)
    ]


def test_layers_are_divided_evenly_where_that_costs_no_bytes() -> None:
    # 52 layers in pages of 10 take 6 groups in any case. So the layers are divided evenly, not as 10, 10, 10, 10, 10
    # and 2.
    layers = layers_of(Kind(SLIDING, 52, 1024))
    family = Divisions.of(layers).family(16, 10 * SLOT)
    assert family is not None
    assert [len(run) for run in family.runs] == [9, 9, 9, 9, 8, 8]
    assert family.layers == layers  # The runs keep the layers' order.
    layout = plan_layout(layers_of(Kind(FULL, 12), Kind(SLIDING, 47, 1024)))
    assert [len(group.layers) for group in layout.groups] == [12, 12, 12, 12, 11]
    # A page of 4 layers holds 4 states, so 10 states take three runs.
    states = Divisions.of(layers_of(Kind(STATE, 10, 4_096))).family(16, 4 * SLOT)
    assert states is not None
    assert [len(run) for run in states.runs] == [4, 3, 3]
    # Bytes are divided evenly, not layers. 3 large layers of two halves and 5 small ones of one half are 11 halves; 3
    # groups get 4, 4 and 3 of them.
    runs = divided(layers_of(Kind(FULL, 3, 0, 2), Kind(FULL, 5)), 3)
    assert [[layer.kv_head_count for layer in run] for run in runs] == [[2, 1, 1], [2, 1, 1], [2, 1]]
    # One layer of four heads and six layers of one head fill two pages of 5 slots. Five window layers fill one page.
    layout = plan_layout(layers_of(Kind(FULL, 1, 0, 4), Kind(FULL, 6), Kind(SLIDING, 5, 512)))
    assert [group.layers for group in layout.groups] == [(0, 1), (2, 3, 4, 5, 6), (7, 8, 9, 10, 11)]
    assert layout.padding_share(256) == 0


def test_heads_of_different_sizes_share_groups_and_lie_apart_in_the_page() -> None:
    # 8 layers with two KV heads and 8 layers with one are the same kind. A page holds 16 tokens of all of them in 12
    # slots; a slot holds one large layer or two small ones.
    layout = plan_layout(layers_of(Kind(FULL, 8, 0, 2), Kind(FULL, 8)))
    assert (layout.group_count, layout.edge_tokens, layout.page_bytes, layout.buffer_count) == (1, 16, 24 * SLOT, 12)
    assert layout.padding_share(256) == 0
    # With 12 window layers, which fill 12 slots, the 16 full layers form two groups of 4 large and 4 small layers.
    layers = layers_of(Kind(FULL, 8, 0, 2), Kind(FULL, 8), Kind(SLIDING, 12, 512))
    layout = plan_layout(layers)
    assert [group.layers for group in layout.groups[:2]] == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert (layout.group_count, layout.edge_tokens, layout.padding_share(256)) == (3, 16, 0)
    check_slices(layout, layers)
    # 2 large layers and a small one share a page of 5 slots; otherwise the small one would need a page of its own.
    assert plan_layout(layers_of(Kind(FULL, 2, 0, 2), Kind(FULL, 1), Kind(SLIDING, 5, 512))).group_count == 2


def test_where_groups_are_limited_blocks_may_grow_as_far_as_needed() -> None:
    # There are 29 states of 4 MiB. With pages of half a state, the states form 58 groups, and 512 tokens of attention
    # fill a quarter of a page. This layout wastes 26 %, more than pages filled by 4,096 tokens (40 groups). It still
    # costs less, because those pages allow hits only at multiples of 4,096 tokens: 53 % instead of 427 %.
    layers = layers_of(Kind(FULL, 3), Kind(STATE, 29, 4 << 20))
    layout = plan_layout(layers, group_count_max=64, block_size_max=8_192)
    assert (layout.group_count, layout.families[0].block_size) == (59, 512)
    assert plan_layout(layers, group_count_max=64).families[0].block_size == 64


def test_checkpoints_lie_where_blocks_end() -> None:
    layers = layers_of(Kind(FULL, 4), Kind(STATE, 28, 36_864))
    layout = plan_layout(layers, checkpoint_tokens=320)
    assert (layout.edge_tokens, layout.checkpoint_tokens, layout.checkpoint_block_count) == (64, 320, 16)
    assert plan_layout(layers[:4]).checkpoint_tokens == 0
    huge = plan_layout(layers_of(Kind(FULL, 1), Kind(STATE, 1, 1 << 24)))  # this state is as large as 65,536 tokens
    assert huge.group_count == 513  # Pages of 64 tokens would take 1,025 groups; a pool has at most 1,024.
    assert huge.checkpoint_tokens == 4_096
    with pytest.raises(ValueError, match="multiple of the block size of 64"):
        plan_layout(layers, checkpoint_tokens=96)


@pytest.mark.parametrize("arguments", [{"block_size": 0}, {"token_count_max": 0}, {"group_count_max": 0}], ids=str)
def test_arguments_out_of_range_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        plan_layout(layers_of(Kind(FULL, 1)), **arguments)  # type: ignore[arg-type]


def test_what_cannot_be_laid_out_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to plan"):
        plan_layout([])
    with pytest.raises(ValueError, match="a page has 4096"):
        Family((layers_of(Kind(FULL, 2)),), 16, SLOT)
    with pytest.raises(ValueError, match="different kinds or windows"):
        Family((layers_of(Kind(FULL, 1), Kind(SLIDING, 1, 32)),), 16, 2 * SLOT)
    family = Family((layers_of(Kind(FULL, 2)),), 16, 2 * SLOT)
    with pytest.raises(ValueError, match="must have the layout's page size"):
        Layout((family,), SLOT)
    for wrong in ({"kind": FULL}, {"kind": STATE}, {"kind": SLIDING, "kv_head_count": 1, "head_dim": 8}):
        with pytest.raises(ValueError, match="layer 7"):
            LayerSpec(7, **wrong)  # type: ignore[arg-type]


# -- a naive twin ------------------------------------------------------------------------------------------------------


def attended(family: Family, position: int) -> Iterable[int]:
    """Returns the tokens that the query at a position attends to."""
    if family.kind is SLIDING:
        return range(max(position - family.window + 1, 0), position + 1)
    if family.kind is CHUNKED:
        return range(position - position % family.window, position + 1)
    return range(position + 1)


def naive_blocks(family: Family, token_count: int, pass_token_count: int) -> int:
    """Counts the blocks with a token that some query of the pass reads or writes, one token at a time."""
    if family.kind is STATE:
        return 1
    queries = range(max(token_count - pass_token_count, 0), token_count)
    return len({token // family.block_size for query in queries for token in attended(family, query)})


def random_layers(chance: random.Random) -> tuple[LayerSpec, ...]:
    kinds = [Kind(FULL, chance.randint(1, 12), 0, chance.choice([1, 2, 4]))]
    if chance.random() < 0.4:
        kinds.append(Kind(FULL, chance.randint(1, 6), 0, chance.choice([1, 3])))
    if chance.random() < 0.7:
        kinds.append(Kind(SLIDING, chance.randint(1, 30), chance.randint(2, 100), chance.choice([1, 2, 3])))
    if chance.random() < 0.4:
        kinds.append(Kind(CHUNKED, chance.randint(1, 9), chance.choice([32, 50, 64]), chance.choice([1, 2])))
    if chance.random() < 0.4:
        kinds.append(Kind(STATE, chance.randint(1, 20), chance.randint(1, 40) * 1_000))
    made = list(layers_of(*kinds))
    chance.shuffle(made)
    return tuple(LayerSpec(**{**{n: getattr(m, n) for n in m.__slots__}, "layer": i}) for i, m in enumerate(made))


@pytest.mark.parametrize("seed", range(40))
def test_a_layout_agrees_with_a_model_that_looks_at_every_token_and_byte(seed: int) -> None:
    chance = random.Random(seed)
    layers = random_layers(chance)
    layout = plan_layout(layers, block_size=chance.choice([4, 16]), token_count_max=1_000)
    for _ in range(10):
        tokens, width = chance.randint(1, 300), chance.randint(1, 80)
        for family in layout.families:
            assert family.block_count(tokens, width) == naive_blocks(family, tokens, width)
            assert family.block_count(tokens, width) <= family.block_count_peak(tokens, width)
            peak = max(family.block_count(length) for length in range(1, tokens + 1))
            aligned = family.kind is not CHUNKED or family.window % family.block_size == 0
            assert peak == family.block_count_peak(tokens) if aligned else peak <= family.block_count_peak(tokens)
        assert layout.blocks_needed(tokens) == sum(
            naive_blocks(family, tokens, 1) * family.group_count for family in layout.families
        )
        live = sum(
            family.live_bytes(tokens)
            if family.kind is STATE
            else len(list(attended(family, tokens - 1))) * sum(layer.token_bytes for layer in family.layers)
            for family in layout.families
        )
        held = layout.blocks_needed(tokens) * layout.page_bytes
        assert layout.unused_share(tokens) == pytest.approx(1 - live / held)
        assert layout.padding_share(tokens) <= layout.unused_share(tokens) + 1e-9
    check_slices(layout, layers)


def check_slices(layout: Layout, layers: tuple[LayerSpec, ...]) -> None:
    """Checks every layer's slices: they have all its bytes, belong to groups that name the layer, are aligned, lie
    inside slots, and overlap no other slice."""
    taken: dict[int, list[tuple[int, int]]] = {}
    slices = layout.slices()
    assert set(slices) == set(layers)
    for layer, parts in slices.items():
        family = next(family for family in layout.families if layer in family.layers)
        assert sum(part.size for part in parts) == (layer.state_bytes or family.layer_bytes(layer))
        assert parts[0].offset % (STATE_ALIGNMENT_BYTES if layer.kind is STATE else 2) == 0
        for part in parts:
            assert layer.layer in layout.groups[part.group].layers
            first_slot, last_slot = part.offset // layout.slot_bytes, (part.offset + part.size - 1) // layout.slot_bytes
            assert first_slot == last_slot < layout.buffer_count
            taken.setdefault(part.group, []).append((part.offset, part.offset + part.size))
    assert sorted(taken) == list(range(layout.group_count))
    padding = 0
    for ranges in taken.values():
        ranges.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        padding += layout.page_bytes - sum(end - start for start, end in ranges)
    assert padding == sum(family.padding_bytes for family in layout.families)


# -- public names ------------------------------------------------------------------------------------------------------


def test_planning_needs_nothing_but_the_standard_library() -> None:
    for path in Path(planning.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                ours = name.startswith("quire.planning") or name in ("quire.types", "quire._numbers")
                assert ours or name.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"
