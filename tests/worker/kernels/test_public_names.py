"""The kernels under FlashInfer's names, and the example of the documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import quire_kernels
import torch
from quire_kernels import extra
from quire_kernels.shared.reference import LSE_TOLERANCE, TOLERANCE

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "attention.md"


@pytest.mark.parametrize("module", [quire_kernels, extra])
def test_every_public_name_is_there(module: ModuleType) -> None:
    assert set(module.__all__) == set(module._MODULES)
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=r"no attribute 'BatchNothing'$"):
        module.BatchNothing  # noqa: B018


def test_what_is_ours_is_beside_flashinfers_names_and_not_among_them() -> None:
    assert not set(quire_kernels.__all__) & set(extra.__all__)
    for name in extra.__all__:
        with pytest.raises(AttributeError, match=f"no attribute '{name}': it is in quire_kernels.extra"):
            getattr(quire_kernels, name)


def test_every_public_name_of_the_kernels_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    names = [*quire_kernels.__all__, *(f"extra.{name}" for name in extra.__all__)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_example_of_the_documentation_gives_the_softmax(device: torch.device) -> None:
    example = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0]
    scope: dict[str, torch.Tensor] = {}
    exec(example.replace('device = "cuda"', f'device = "{device.type}"'), scope)
    for request, pages in enumerate([[5, 1], [4]]):
        length = [19, 16][request]
        keys, values = (scope["pages"][pages, part].flatten(0, 1)[:length].double() for part in (0, 1))
        for head in range(8):
            scores = keys[:, head // 4] @ scope["query"][request, head].double() / 8
            expected = scores.softmax(0) @ values[:, head // 4]
            torch.testing.assert_close(
                scope["output"][request, head].double(),
                expected,
                rtol=TOLERANCE[torch.float16],
                atol=TOLERANCE[torch.float16],
            )
            log2 = scores.logsumexp(0) / torch.log(torch.tensor(2.0, dtype=torch.float64))
            torch.testing.assert_close(
                scope["lse"][request, head].double(), log2.double(), rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE
            )


def test_the_example_of_warming_up_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_kernels.compilation.warmup.WORKSPACE_BYTES", 8 << 20)
    example = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[1]
    seen: list[tuple[int, int, str]] = []
    on_device = example.replace('device = "cuda"', f'device = "{device.type}"')
    exec(on_device, {"print": lambda *step: seen.append(step)})  # the second example uses no names of the first
    assert seen[-1] == (7, 7, "done")


def test_the_names_for_the_worker_need_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; from quire_worker.attention import TorchPagedAttention, backend_for"
    )
    code += "; backend_for('cpu')\ntry:\n    backend_for('cuda')\nexcept ValueError as error:\n    print(error)"
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
        capture_output=True, text=True, timeout=60, check=True, env={"QUIRE_CPU": "0"},
    )  # fmt: skip
    assert "'cuda' needs Triton" in done.stdout
