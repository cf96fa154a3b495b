"""Tests the meaning of permission URIs in a certificate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.protocol.permissions import EVERYTHING, KINDS, Patterns, Permissions, permissions_of, uris_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXT.filter(lambda name: not name.endswith("*"))


def allowed(uri: str, name: str) -> list[str]:
    """Returns the actions that one URI permits with one name."""
    permissions = permissions_of([uri])
    answers = {
        "own": permissions.may_own(name),
        "observe": permissions.may_observe(name),
        "use": permissions.may_use(name),
        "observe all": permissions.may_observe_all,
    }
    return [verb for verb, answer in answers.items() if answer]


@pytest.mark.parametrize(
    ("uri", "name", "verbs"),
    [
        ("quire://pool/a", "a", ["own", "observe"]),
        ("quire://pool/a", "b", []),
        ("quire://pool/a", "ab", []),
        ("quire://pool/a", "", []),
        ("quire://pool/a/b", "a/b", ["own", "observe"]),
        ("quire://pool/a*", "ab", ["own", "observe"]),
        ("quire://pool/a*", "a", ["own", "observe"]),
        ("quire://pool/a*", "ba", []),
        ("quire://pool/*", "a", ["own", "observe", "observe all"]),
        ("quire://observe/a", "a", ["observe"]),
        ("quire://observe/*", "a", ["observe", "observe all"]),
        ("quire://namespace/a", "a", ["use"]),
        ("quire://namespace/", "", ["use"]),
        ("quire://namespace/", "a", []),
        ("quire://namespace/*", "", ["use"]),
        ("quire://namespace/a%2A", "a*", ["use"]),
        ("quire://namespace/a%2A", "ab", []),
        ("quire://namespace/gr%C3%B6%C3%9Fe", "größe", ["use"]),
        ("quire://namespace/%FF", "\ufffd", []),
        ("quire://namespace", "", []),
        ("quire://everything/*", "a", []),
        ("quire://pool", "", []),
        ("https://pool/a", "a", []),
        ("pool/a", "a", []),
        ("", "", []),
    ],
)
def test_a_uri_permits_this_and_no_more(uri: str, name: str, verbs: list[str]) -> None:
    assert allowed(uri, name) == verbs


def test_no_uri_permits_nothing_and_everything_is_everything() -> None:
    assert permissions_of([]) == Permissions()
    for name in ("", "a", "größe"):
        nobody = Permissions()
        assert [nobody.may_own(name), nobody.may_observe(name), nobody.may_use(name)] == [False] * 3
        assert EVERYTHING.may_own(name)
        assert EVERYTHING.may_observe(name)
        assert EVERYTHING.may_use(name)
    assert not Permissions().may_observe_all


@given(kind=st.sampled_from(KINDS), written=NAMES, asked=NAMES)
def test_a_name_that_is_written_down_permits_itself_alone(kind: str, written: str, asked: str) -> None:
    (uri,) = uris_of(Patterns(**{kind: [written]}))
    assert uri.isascii()
    permissions = permissions_of([uri])
    may = {"pool": permissions.may_own, "observe": permissions.may_observe, "namespace": permissions.may_use}[kind]
    assert may(written)
    assert may(asked) == (asked == written)


@given(written=NAMES, ending=TEXT, asked=TEXT)
def test_a_trailing_star_permits_every_ending(written: str, ending: str, asked: str) -> None:
    permissions = permissions_of(uris_of(Patterns(namespace=[f"{written}*"])))
    assert permissions.may_use(written + ending)
    assert permissions.may_use(asked) == asked.startswith(written)
