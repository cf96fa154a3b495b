"""`scripts/sentences.py` finds each kind of sentence, and draws the same sample for the same seed."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "sentences.py"
SOURCE = '''"""A module of two sentences. This is the second one."""
LIMIT = 3  # the most that a page holds
# A longer comment that goes
# over two lines.
raise ValueError(f"limit must be at least 1, not {LIMIT}")
'''
MARKDOWN = """# A title of four words
A sentence that goes
over two lines. A second sentence stands here.

| a cell of four words | two words |

```
code of no interest here
```
- An item of a list.
"""


@pytest.fixture(scope="module")
def sentences() -> ModuleType:
    """Loads the script as a module."""
    spec = importlib.util.spec_from_file_location("sentences", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_sentences_of_each_kind_are_found_with_their_lines(sentences: ModuleType) -> None:
    tree = ast.parse(SOURCE)
    assert [found[1:] for found in sentences.docstrings("a.py", tree)] == [
        (1, "A module of two sentences."),
        (1, "This is the second one."),
    ]
    assert [found[1:] for found in sentences.comments("a.py", SOURCE)] == [
        (2, "the most that a page holds"),
        (3, "A longer comment that goes over two lines."),
    ]
    assert [found[1:] for found in sentences.messages("a.py", tree)] == [(5, "limit must be at least 1, not {LIMIT}")]
    assert [found[1:] for found in sentences.documents("a.md", MARKDOWN)] == [
        (2, "A sentence that goes over two lines."),
        (2, "A second sentence stands here."),
        (5, "a cell of four words"),
        (10, "An item of a list."),
    ]
