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
def test_a_caller_may_call_what_one_of_its_patterns_matches_as_a_whole(patterns: list[str], name: str) -> None:
    """As Python's fnmatch has it, with regard to case; the second look at a name is answered as the first."""
    caller = _caller(*(f"infer:{pattern}" for pattern in patterns))
    expected = any(fnmatchcase(name, pattern) for pattern in patterns)
    assert [caller.may_infer(name), caller.may_infer(name)] == [expected, expected]
    assert caller.may_infer("") == bool(patterns)


@given(PATTERNS, PATTERNS, NAMES)
def test_what_scopes_do_not_lack_they_allow(own: list[str], others: list[str], name: str) -> None:
    """Whatever is called by one of the other patterns."""
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
    """So that whoever may do more now than before is not taken for one that may do less."""
    lost = Scopes.parse([f"infer:{own}"]).lacks(Scopes.parse([f"infer:{other}"]))
    assert lost == (f"infer:{other}" if is_lost else "")


@given(PATTERNS, st.sets(st.sampled_from(["read", "metrics", "admin"])))
def test_scopes_are_written_as_they_are_read(patterns: list[str], flags: set[str]) -> None:
    """Nothing is lost on the way."""
    scopes = Scopes.parse([*(f"infer:{pattern}" for pattern in patterns), *flags])
    assert Scopes.parse(scopes.texts()) == scopes


@pytest.mark.parametrize("text", ["", "infer:", "infer", "Read", "write", "infer :a"])
def test_what_is_no_scope_is_refused_by_its_text(text: str) -> None:
    """Rather than left out, which would seem to have worked."""
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
def test_each_scope_meets_its_needs_and_no_others(scope: str, met: set[Need]) -> None:
    """For the service "add"; the refusal says which scope is missing, and for whom."""
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
    """Requests for ever new names do not grow the memory that a caller takes."""
    caller = _caller("infer:a*")
    tracemalloc.start()
    try:
        assert all(caller.may_infer(f"a{number}") for number in range(20_000))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 20,000 names alone would take 1 MB.
    assert held < 300_000
