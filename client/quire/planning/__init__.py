"""From what a model's layers keep to groups, pages and blocks. Pure: numbers in, numbers out.

    model = read_config(json.loads(Path("config.json").read_text()), tensor_parallel=8)
    layout = plan_layout(model.layers, token_count_max=32_768)
    block_count = blocks_for(layout, 80 << 30, utilization=0.9, used_bytes=40 << 30)
    block_count // layout.blocks_peak(4_096)  # sequences of 4,096 tokens that fit

`plan_layout` states its rule, `Layout` what lies where; docs/layout.md has the figures of ten architectures.
"""

from quire.planning.config import ModelCache, layers_from_config, read_config
from quire.planning.fields import ConfigError
from quire.planning.layout import Family, Group, Layout, PageSlice
from quire.planning.memory import blocks_for, longest_sequence, parse_bytes, parse_tokens
from quire.planning.planner import full_attention_bytes, lengths_up_to, plan_layout, smallest_count_layout
from quire.planning.specs import LayerSpec, element_bytes_of

__all__ = [
    "ConfigError",
    "Family",
    "Group",
    "LayerSpec",
    "Layout",
    "ModelCache",
    "PageSlice",
    "blocks_for",
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
]
