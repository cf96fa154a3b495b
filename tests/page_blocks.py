"""The blocks of commands and code in the documents, and the test that runs each of them.

`tests/test_docs.py` fails for a block without an entry in `HOW`. An entry names the test file that runs the block, or
the reason why no test can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
INDENT: Final = "    "

HERE: Final = "tests/e2e/test_pages.py"
README: Final = "tests/e2e/test_readme.py"
HASHING: Final = "tests/client/test_hashing.py"
KERNELS: Final = "tests/worker/kernels/test_public_names.py"
VLLM: Final = "integrations/vllm/tests/test_page.py"
TYPESCRIPT: Final = "tests/typescript/test_owner.py"
CONFORMANCE: Final = "tests/test_conformance.py"

TEXT: Final = "no command: a formula or a tree of files"
DOCKER: Final = "not run: needs Docker"
KUBERNETES: Final = "not run: needs a cluster of Kubernetes"
HOST: Final = "not run: makes users and services of the host"
GPU: Final = "not run: needs a GPU"
REASONS: Final = (TEXT, DOCKER, KUBERNETES, HOST, GPU)

# Page -> the test that runs the page's code blocks, or the reason why no test runs them. A line with a block's
# beginning is an exception for this block.
HOW: Final = {
    "ARCHITECTURE.md": TEXT,
    "CONTRIBUTING.md": HERE,
    "README.md": README,
    "benchmarks/README.md": HERE,
    "benchmarks/README.md: python benchmarks/kernels.py --json": GPU,
    "conformance/README.md": CONFORMANCE,
    "docs/attention.md": KERNELS,
    "docs/beams.md": HERE,
    "docs/branches.md": HERE,
    "docs/engine.md": README,
    "docs/first-hour.md": README,
    "docs/fleet.md": KUBERNETES,
    "docs/fleet.md: useradd": HOST,
    "docs/gateway.md": HERE,
    "docs/hash.md": TEXT,
    "docs/hash.md: fingerprint =": HASHING,
    "docs/hybrid.md": HERE,
    "docs/model/README.md": HERE,
    "docs/models.md": HERE,
    "docs/operating.md": HERE,
    "docs/operating.md: startupProbe:": KUBERNETES,
    "docs/sampling.md": HERE,
    "docs/scheduling.md": TEXT,
    "docs/security.md": HERE,
    "docs/security.md: docker compose": DOCKER,
    "docs/session.md": HERE,
    "docs/speculation.md": HERE,
    "docs/vllm.md": VLLM,
    "examples/typescript/README.md": TYPESCRIPT,
}


class Block(NamedTuple):
    """A block of a page: its page, its language (empty if it is only indented) and its text."""

    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        """The first line."""
        return self.text.partition("\n")[0].strip()

    @property
    def key(self) -> str | None:
        """The key of the block's entry in `HOW`; None if the block has no entry."""
        own = [key for key in HOW if key.startswith(f"{self.page}: ") and f"{self.page}: {self.first}".startswith(key)]
        return own[0] if own else self.page if self.page in HOW else None


def pages() -> list[Path]:
    """Returns every document with commands for readers."""
    return [
        *sorted(ROOT.glob("*.md")),
        *(
            page
            for folder in ("docs", "examples", "integrations", "benchmarks", "conformance", "tests")
            for page in sorted((ROOT / folder).rglob("*.md"))
            if "node_modules" not in page.parts
        ),
    ]


def blocks_of(page: Path) -> list[Block]:
    """Returns the fenced and the indented blocks of a page, in order. Quoted blocks are outputs, and left out."""
    name, lines = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8").split("\n")
    found, begun, fence = list[Block](), list[str](), None
    for before, line in zip(["", *lines], [*lines, ""], strict=True):
        if fence is not None:
            if line.strip() == "```":
                found.append(Block(name, fence, "\n".join(begun)))
                begun, fence = [], None
            else:
                begun.append(line)
        elif line.startswith("```"):
            fence = line[3:].strip()
        elif line.startswith(INDENT) and (begun or not before):
            begun.append(line.removeprefix(INDENT))
        elif begun:
            found.append(Block(name, "", "\n".join(begun)))
            begun = []
    return found
