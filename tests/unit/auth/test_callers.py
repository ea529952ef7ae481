from __future__ import annotations

import json
import os
import stat
import tracemalloc
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.auth.key_file import CallerEntry, key_hash, new_key, parse_callers, read_key_file, write_key_file
from ovmstrio.auth.quota import CallerQuota, TokenBucket
from ovmstrio.core.callers import Caller, Permission, Scopes
from ovmstrio.core.errors import CallerLimited, ConfigError, MissingScope, Problem

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
def test_a_superset_of_scopes_allows_at_least_the_same_models(own: list[str], others: list[str], name: str) -> None:
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
    assert Scopes.parse_known(["read", text]) == Scopes(read=True)


@pytest.mark.parametrize(
    ("scope", "met"),
    [
        ("infer:a*", {Permission.NOTHING, Permission.CALLER, Permission.ABOUT, Permission.INFER, Permission.GENERATE}),
        ("infer:b", {Permission.NOTHING, Permission.CALLER}),
        ("read", {Permission.NOTHING, Permission.CALLER, Permission.ABOUT, Permission.READ}),
        ("metrics", {Permission.NOTHING, Permission.CALLER, Permission.METRICS}),
        ("admin", {Permission.NOTHING, Permission.CALLER, Permission.ABOUT, Permission.READ, Permission.ADMIN}),
    ],
)
def test_each_scope_meets_only_its_needs(scope: str, met: set[Permission]) -> None:
    caller = _caller(scope)
    for need in Permission:
        if need in met:
            caller.check(need, "add")
            continue
        with pytest.raises(MissingScope, match="'shop' lacks the scope") as caught:
            caller.check(need, "add")
        expected = {Permission.INFER: "infer:add", Permission.GENERATE: "infer:add", Permission.ABOUT: "read"}
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


# The key file


_TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
_PROOFS = st.one_of(
    st.binary(min_size=32, max_size=32).map(lambda digest: {"sha256": digest.hex()}),
    _TEXTS.map(lambda text: {"certificate": text}),
    _TEXTS.map(lambda text: {"subject": text}),
)
_SCOPES = st.lists(st.one_of(st.sampled_from(["read", "admin", "metrics"]), _TEXTS.map("infer:{}".format)), max_size=3)


@st.composite
def _entries(draw: Any) -> CallerEntry:
    limits = {
        "requests_per_second": draw(st.floats(0, 1e6, allow_subnormal=False)),
        "concurrency": draw(st.integers(0, 1000)),
        "tokens_per_minute": draw(st.integers(0, 10**9)),
    }
    expires = draw(st.one_of(st.just(""), st.dates().map(str)))
    name = draw(st.text(st.characters(categories=["L", "N"], include_characters="_.@:/-"), min_size=1, max_size=20))
    return CallerEntry(name, Scopes.parse(draw(_SCOPES)), **draw(_PROOFS), **limits, expires=expires)


@given(
    st.lists(
        _entries(),
        max_size=4,
        unique_by=(lambda entry: entry.name, lambda entry: (entry.sha256, entry.certificate, entry.subject)),
    )
)
def test_written_callers_are_read_back(entries: list[CallerEntry]) -> None:
    text = json.dumps({"callers": [entry.document() for entry in entries]})
    assert parse_callers(text.encode(), "keys.json") == entries


def _problems_of(content: bytes) -> tuple[Problem, ...]:
    try:
        parse_callers(content, "keys.json")
    except ConfigError as error:
        return error.problems
    return ()


@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps)))
def test_any_content_is_read_or_refused_with_its_file(content: bytes | str) -> None:
    problems = _problems_of(content.encode() if isinstance(content, str) else content)
    assert {problem.file for problem in problems} <= {"keys.json"}


_GOOD = {"name": "shop", "sha256": key_hash("x"), "scopes": ["read"]}


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        ([{**_GOOD, "scope": "read"}], "unknown key 'scope'"),
        ([{"name": "shop", "sha256": key_hash("x")}], "'scopes' is missing"),
        ([{"name": "shop", "scopes": []}], "expected one of sha256, certificate, subject"),
        ([{**_GOOD, "subject": "s"}], "expected one of sha256, certificate, subject"),
        ([{**_GOOD, "sha256": "ovms_secret"}], "invalid hash (expected 64 lower-case hexadecimal digits"),
        ([{**_GOOD, "name": "a b"}], "invalid name"),
        ([{**_GOOD, "expires": "2026-2-30"}], "invalid date"),
        ([{**_GOOD, "scopes": ["write"]}], "got 'write'"),
        ([{**_GOOD, "concurrency": -1}], "0 or more"),
        ([{**_GOOD, "tokens_per_minute": -1}], "0 or more"),
        ([_GOOD, {**_GOOD, "sha256": key_hash("y")}], "duplicate name"),
        ([_GOOD, {**_GOOD, "name": "other"}], "duplicate sha256"),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_without_secrets(callers: list[Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_callers(json.dumps({"callers": callers}, indent=1).encode(), "keys.json")
    assert expected in caught.value.message
    assert caught.value.message.startswith("keys.json:")
    assert "ovms_secret" not in caught.value.message


def test_a_new_file_is_private_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    entry = CallerEntry("shop", Scopes(read=True), sha256=key_hash(new_key()))
    write_key_file(file, [entry])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    write_key_file(file, [entry, CallerEntry("node", Scopes(), certificate="n")])
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [each.name for each in read_key_file(file)] == ["shop", "node"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_replaced_file_keeps_its_owner_and_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of another user must be able to read its file after an administrator has added a key."""
    owners: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "chown", lambda _path, user, group: owners.append((user, group)))
    file, link = tmp_path / "secret.json", tmp_path / "keys.json"
    write_key_file(file, [])
    link.symlink_to(file)
    write_key_file(link, [CallerEntry("shop", Scopes(read=True), sha256=key_hash(new_key()))])
    assert owners == [(file.stat().st_uid, file.stat().st_gid)]
    assert link.readlink() == file
    assert [each.name for each in read_key_file(file)] == ["shop"]


def test_keys_are_long_and_unique() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("ovms_") and len(key) == 5 + 43 for key in keys)


# Limits


async def test_requests_per_second_are_limited_with_the_time_of_the_next(mock_clock: trio.testing.MockClock) -> None:
    allowance = CallerQuota("shop", requests_per_second=4)
    for _ in range(4):
        allowance.acquire()
    with pytest.raises(
        CallerLimited, match=r"'shop' is limited to 4 requests per second; try again in 0.25 s"
    ) as caught:
        allowance.acquire()
    assert caught.value.retry_after_seconds == pytest.approx(0.25)
    mock_clock.jump(0.25)
    allowance.acquire()
    with pytest.raises(CallerLimited):
        allowance.acquire()
    assert allowance.in_flight == 5


async def test_concurrent_requests_count_until_they_end() -> None:
    allowance = CallerQuota("shop", concurrency=2)
    allowance.acquire()
    allowance.acquire()
    with pytest.raises(CallerLimited, match="caller 'shop': limit of 2 concurrent requests"):
        allowance.acquire()
    allowance.release()
    allowance.acquire()
    assert allowance.in_flight == 2


async def test_tokens_per_minute_are_limited_after_they_are_used(mock_clock: trio.testing.MockClock) -> None:
    allowance = CallerQuota("shop", tokens_per_minute=120)
    allowance.check_tokens()
    allowance.spend_tokens(119)
    allowance.check_tokens()
    allowance.spend_tokens(31)
    refusal = r"'shop' is limited to 120 tokens per minute; try again in 16 s"
    with pytest.raises(CallerLimited, match=refusal) as caught:
        allowance.check_tokens()
    assert caught.value.retry_after_seconds == pytest.approx(15.5)
    mock_clock.jump(15.4)
    with pytest.raises(CallerLimited):
        allowance.check_tokens()
    mock_clock.jump(0.1)
    allowance.check_tokens()


async def test_tokens_and_requests_are_separate_limits() -> None:
    allowance = CallerQuota("shop", concurrency=1, tokens_per_minute=1)
    allowance.spend_tokens(1000)
    allowance.acquire()
    assert allowance.in_flight == 1
    other = CallerQuota("shop", requests_per_second=1)
    other.spend_tokens(10**9)
    other.check_tokens()


@given(st.floats(0.1, 50), st.lists(st.floats(0, 3), max_size=60))
def test_no_interval_has_more_than_rate_and_burst(rate: float, pauses: list[float]) -> None:
    now = 0.0
    bucket = TokenBucket(rate, clock=lambda: now)
    passed: list[float] = []
    for pause in pauses:
        now += pause
        wait = bucket.acquire()
        if wait == 0:
            passed.append(now)
        else:
            now += wait
            assert bucket.acquire() == 0, "when it says so, there is one"
            passed.append(now)
    burst = max(1.0, rate)
    for first, start in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + (passed[last] - start) * rate + 1e-3
