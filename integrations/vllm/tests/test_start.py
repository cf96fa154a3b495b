"""What is refused when the engine starts, by name. Run by `make test-vllm`."""

from __future__ import annotations

import tomllib

import pytest

from integrations.vllm.tests.peers import PYTHON, ROOT, WHY_NOT, in_vllm

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
    """What the check of the release says, after a change to vLLM."""
    output = in_vllm("-c", CHECK.format(change=change), VLLM_LOGGING_LEVEL="ERROR", **environment)
    return output.splitlines()[-1]


def test_the_tested_release_is_taken() -> None:
    assert checked() == "TAKEN"


def test_another_release_is_refused_unless_asked_for() -> None:
    change = "vllm.__version__ = '0.99.0'"
    assert "REFUSED quire_vllm was tested with vLLM 0.32.0, this is 0.99.0" in checked(change)
    assert checked(change, QUIRE_VLLM_ANY_RELEASE="1") == "TAKEN"


def test_a_name_that_moved_is_refused_by_name() -> None:
    said = checked("del KVCacheManager.new_step_starts; KVCacheManager.free = lambda self, req: None")
    assert said.startswith("REFUSED")
    assert said.endswith("lacks what quire_vllm needs: KVCacheManager.new_step_starts, KVCacheManager.free")


def test_a_name_of_the_block_pool_that_moved_is_refused_by_name() -> None:
    said = checked("from vllm.v1.core.block_pool import BlockPool; del BlockPool._build_block_stored_event")
    assert said.endswith("lacks what quire_vllm needs: BlockPool._build_block_stored_event")


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
