"""Plans groups, pages and blocks from the cache of a model's layers. Pure: numbers in, numbers out.

    model = read_config(json.loads(Path("config.json").read_text()), tensor_parallel=8)
    layout = plan_layout(model.layers, token_count_max=32_768)
    block_count = blocks_for(layout, 80 << 30, utilization=0.9, used_bytes=40 << 30)
    block_count // layout.blocks_peak(4_096)  # sequences of 4,096 tokens that fit
    chats_kept(layout, block_count, 4_096, Retention.TAIL)  # idle chats of 4,096 tokens that can still be hit

`Prices` computes a layout's cost, and `plan_layout` finds the cheapest one. `Layout` has the place of each layer's
bytes. docs/layout.md has the figures of ten architectures.
"""

from quire.planning.config import ModelCache, layers_from_config, read_config
from quire.planning.cost import GROUP_COST, Cost, Prices, lengths_up_to
from quire.planning.family import Family
from quire.planning.fields import ConfigError
from quire.planning.layout import Group, Layout, PageSlice
from quire.planning.memory import blocks_for, longest_sequence, parse_bytes, parse_tokens
from quire.planning.planner import full_attention_bytes, plan_layout, smallest_count_layout
from quire.planning.retention import Retention, chat_block_count, chats_kept
from quire.planning.specs import LayerSpec, element_bytes_of
from quire.planning.weight_bytes import weight_bytes

__all__ = [
    "GROUP_COST",
    "ConfigError",
    "Cost",
    "Family",
    "Group",
    "LayerSpec",
    "Layout",
    "ModelCache",
    "PageSlice",
    "Prices",
    "Retention",
    "blocks_for",
    "chat_block_count",
    "chats_kept",
    "element_bytes_of",
    "full_attention_bytes",
    "layers_from_config",
    "lengths_up_to",
    "longest_sequence",
    "parse_bytes",
    "parse_tokens",
    "plan_layout",
    "read_config",
    "smallest_count_layout",
    "weight_bytes",
]
