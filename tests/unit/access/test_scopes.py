"""What callers may do: scopes as they are written, and what each lets pass."""

from __future__ import annotations

import tracemalloc
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.callers import Caller, Need, Scopes
from ovmstrio.core.errors import MissingScope

NAMES = st.text("ab*?[]-._/", max_size=6)
PATTERNS = st.lists(NAMES.filter(bool), max_size=3)


def _caller(*scopes: str) -> Caller:
    return Caller("shop", "key", Scopes.parse(scopes))


@given(PATTERNS, NAMES.filter(bool))
def test_a_caller_can_call_names_that_match_a_pattern(patterns: list[str], name: str) -> None:
    caller = _caller(*(f"infer:{pattern}" for pattern in patterns))
    expected = any(fnmatchcase(name, pattern) for pattern in patterns)
    assert [caller.may_infer(name), caller.may_infer(name)] == [expected, expected]
    assert caller.may_infer("") == bool(patterns)


@given(PATTERNS, PATTERNS, NAMES)
def test_scopes_allow_what_they_do_not_lack(own: list[str], others: list[str], name: str) -> None:
    mine, theirs = (_caller(*(f"infer:{pattern}" for pattern in patterns)) for patterns in (own, others))
    if not mine.scopes.lacks(theirs.scopes) and name:
        assert mine.may_infer(name) >= theirs.may_infer(name)


@pytest.mark.parametrize(
    ("own", "other", "is_lost"),
    [
        ("resnet*", "resnet50", False),
        ("resnet*", "resnet5*", False),
        ("*net*", "res*net?", False),
        ("resnet[12]", "resnet1", False),
        ("resnet5*", "resnet*", True),
        ("a?", "a*", True),
        ("*ab*", "[ab]", True),
        ("[!a]*", "*b", True),
    ],
)
def test_a_wider_pattern_lacks_nothing_of_a_narrower_one(own: str, other: str, *, is_lost: bool) -> None:
    lost = Scopes.parse([f"infer:{own}"]).lacks(Scopes.parse([f"infer:{other}"]))
    assert lost == (f"infer:{other}" if is_lost else "")


@given(PATTERNS, st.sets(st.sampled_from(["read", "metrics", "admin"])))
def test_written_scopes_are_parsed_again(patterns: list[str], flags: set[str]) -> None:
    scopes = Scopes.parse([*(f"infer:{pattern}" for pattern in patterns), *flags])
    assert Scopes.parse(scopes.texts()) == scopes


@pytest.mark.parametrize("text", ["", "infer:", "infer", "Read", "write", "infer :a"])
def test_invalid_scopes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected read, metrics, admin or infer:PATTERN"):
        Scopes.parse(["read", text])
    assert Scopes.known_of(["read", text]) == Scopes(read=True)


@pytest.mark.parametrize(
    ("scope", "met"),
    [
        ("infer:a*", {Need.NOTHING, Need.CALLER, Need.ABOUT, Need.INFER, Need.GENERATE}),
        ("infer:b", {Need.NOTHING, Need.CALLER}),
        ("read", {Need.NOTHING, Need.CALLER, Need.ABOUT, Need.READ}),
        ("metrics", {Need.NOTHING, Need.CALLER, Need.METRICS}),
        ("admin", {Need.NOTHING, Need.CALLER, Need.ABOUT, Need.READ, Need.ADMIN}),
    ],
)
def test_each_scope_meets_only_its_needs(scope: str, met: set[Need]) -> None:
    caller = _caller(scope)
    for need in Need:
        if need in met:
            caller.demand(need, "add")
            continue
        with pytest.raises(MissingScope, match="'shop' may not do that: it needs the scope") as caught:
            caller.demand(need, "add")
        expected = {Need.INFER: "infer:add", Need.GENERATE: "infer:add", Need.ABOUT: "read"}
        assert caught.value.scope == expected.get(need, need.name.lower())


def test_memory_of_a_caller_is_bounded() -> None:
    caller = _caller("infer:a*")
    tracemalloc.start()
    try:
        assert all(caller.may_infer(f"a{number}") for number in range(20_000))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 20,000 names alone would take 1 MB.
    assert held < 300_000
