"""Tests which tests `make test-pythons` leaves out on Pythons without torch."""

from __future__ import annotations

from scripts.pythons import MODEL, PARTS, ROOT, with_a_model


def test_files_that_need_a_model_are_left_out_and_no_others() -> None:
    ignored = with_a_model(["tests/client/test_first"])
    assert "tests/client/test_planning_weights.py" in ignored, "it imports torch"
    assert "tests/gateway/test_peer_tools.py" in ignored, "it imports a file that does"
    assert "tests/client/test_first_hour.py" in ignored, "it is named"
    assert not [name for name in ignored if name.startswith("tests/allocator/")]
    kept = [
        path
        for part in PARTS
        for path in (ROOT / part).rglob("test_*.py")
        if str(path.relative_to(ROOT)) not in ignored
    ]
    assert len(kept) > len(ignored)
    assert not [path for path in kept if MODEL.search(path.read_text())]


def test_a_file_that_skips_itself_without_the_worker_is_left_out_with_those_that_import_it() -> None:
    ignored = with_a_model([])
    assert {"tests/gateway/test_call_grammars.py", "tests/gateway/test_free_text.py"} <= set(ignored)
