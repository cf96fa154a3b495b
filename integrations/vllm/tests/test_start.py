"""Refusals when the engine starts, which name the unsupported part. Run by `make test-vllm`."""

from __future__ import annotations

import tomllib

import pytest
from peers import MODEL, PYTHON, ROOT, WHY_NOT, in_vllm

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

CHECK = """
import vllm
from vllm.v1.core.kv_cache_manager import KVCacheManager
from quire_vllm.releases import UnsupportedError, check_release
{change}
try:
    check_release()
    print("TAKEN")
except UnsupportedError as error:
    print("REFUSED", error)
"""


def checked(change: str = "", **environment: str) -> str:
    """Returns the result of the release check after a change to vLLM."""
    output = in_vllm("-c", CHECK.format(change=change), VLLM_LOGGING_LEVEL="ERROR", **environment)
    return output.splitlines()[-1]


def test_the_tested_release_is_taken() -> None:
    assert checked() == "TAKEN"


def test_another_release_is_refused_unless_asked_for() -> None:
    change = "vllm.__version__ = '0.99.0'"
    assert "REFUSED quire_vllm was tested with vLLM 0.32.0, but this is 0.99.0" in checked(change)
    assert checked(change, QUIRE_VLLM_ANY_RELEASE="1") == "TAKEN"


def test_a_name_that_moved_is_refused_by_name() -> None:
    said = checked("del KVCacheManager.new_step_starts; KVCacheManager.free = lambda self, req: None")
    assert said.startswith("REFUSED")
    assert said.endswith("lacks functions that quire_vllm needs: KVCacheManager.new_step_starts, KVCacheManager.free")


def test_a_name_of_the_block_pool_that_moved_is_refused_by_name() -> None:
    said = checked("from vllm.v1.core.block_pool import BlockPool; del BlockPool._build_block_stored_event")
    assert said.endswith("lacks functions that quire_vllm needs: BlockPool._build_block_stored_event")


PLUGIN = """
import sys
sys.argv += {arguments}
import vllm
vllm.__version__ = "0.99.0"
from importlib.metadata import EntryPoint
plugin = EntryPoint("quire", {value!r}, "vllm.general_plugins").load()
import logging
heard = []
logging.getLogger("vllm.quire_vllm").warning = lambda text, *values: heard.append(text % values)
plugin()
plugin()
print("HEARD", heard)
"""


@pytest.mark.parametrize(
    ("arguments", "is_told"), [(["--scheduler-cls", "quire_vllm.QuireScheduler"], True), ([], False)]
)
def test_the_entry_point_warns_where_quire_is_meant_and_is_silent_elsewhere(
    arguments: list[str], is_told: bool
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    value = project["project"]["entry-points"]["vllm.general_plugins"]["quire"]
    said = in_vllm("-c", PLUGIN.format(arguments=arguments, value=value), VLLM_LOGGING_LEVEL="ERROR").splitlines()[-1]
    assert said.startswith("HEARD")
    assert ("was tested with vLLM" in said) == is_told


REFUSED = """
from dataclasses import replace
from types import SimpleNamespace as N
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import *
from quire_vllm.releases import UnsupportedError
from quire_vllm.support import check_engine
config = EngineArgs({model!r}, max_model_len=64, skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
config.cache_config.block_size = 16
kinds = dict(num_kv_heads=1, head_size=64, dtype=config.model_config.dtype)
full, long = FullAttentionSpec(16, **kinds), FullAttentionSpec(24, **kinds)
window = SlidingWindowSpec(16, **kinds, sliding_window=32)
state = MambaSpec(16, shapes=((1,),), dtypes=(kinds["dtype"],), mamba_cache_mode="align")
def told(*specs, hashes=16):
    groups = [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]
    try:
        check_engine(config, KVCacheConfig(8, kv_cache_tensors=[], kv_cache_groups=groups), hash_block_size=hashes)
        print("TAKEN")
    except UnsupportedError as error:
        print("REFUSED", error)
told(full, window, state)
told(full, MLAAttentionSpec(16, **kinds), CrossAttentionSpec(16, **kinds))
told(full, long)
told(full, hashes=8)
told(full, replace(state, num_speculative_blocks=2))
told(full, replace(state, block_size=32))
config.cache_config.use_replayssm = True
told(full, state)
config.kv_transfer_config, config.observability_config.kv_cache_metrics = N(), True
config.speculative_config, config.parallel_config.decode_context_parallel_size = N(use_eagle=lambda: True), 2
config.model_config.__dict__["is_encoder_decoder"] = True
told(full)
"""


def test_what_needs_vllms_own_manager_is_refused_by_name() -> None:
    output = in_vllm("-c", REFUSED.format(model=MODEL), VLLM_LOGGING_LEVEL="ERROR")
    taken, kinds, multiples, hashes, drafts, sizes, replayed, options = output.splitlines()[-8:]
    assert taken == "TAKEN"
    assert "KV cache groups of CrossAttentionSpec, MLAAttentionSpec" in kinds
    assert "blocks that are not multiples of the smallest" in multiples
    assert "hashes of 8 tokens for blocks of 16" in hashes
    assert "speculation with recurrent states" in drafts
    assert "states whose size differs from a block's" in sizes
    assert "replayed states (use_replayssm)" in replayed
    for reason in ("KV connectors", "residency metrics", "EAGLE and MTP", "encoder-decoder", "context parallelism"):
        assert reason in options
