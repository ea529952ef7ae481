"""The file of callers: written and read, and every mistake in it told with its line."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.access.key_file import CallerEntry, digest_of, new_key, read_callers, read_key_file, write_key_file
from ovmstrio.core.callers import Scopes
from ovmstrio.core.errors import ConfigError, Problem

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
    name = draw(st.from_regex(r"[\w.@:/-]{1,20}", fullmatch=True))
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
    assert read_callers(text.encode(), "keys.json") == entries


def _problems_of(content: bytes) -> tuple[Problem, ...]:
    try:
        read_callers(content, "keys.json")
    except ConfigError as error:
        return error.problems
    return ()


@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps)))
def test_any_content_is_read_or_refused_with_its_file(content: bytes | str) -> None:
    problems = _problems_of(content.encode() if isinstance(content, str) else content)
    assert {problem.file for problem in problems} <= {"keys.json"}


_GOOD = {"name": "shop", "sha256": digest_of("x"), "scopes": ["read"]}


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        ([{**_GOOD, "scope": "read"}], "unknown key 'scope'"),
        ([{"name": "shop", "sha256": digest_of("x")}], "'scopes' is missing"),
        ([{"name": "shop", "scopes": []}], "expected one of sha256, certificate, subject"),
        ([{**_GOOD, "subject": "s"}], "expected one of sha256, certificate, subject"),
        ([{**_GOOD, "sha256": "ovms_secret"}], "no hash (expected 64 small hexadecimal digits"),
        ([{**_GOOD, "name": "a b"}], "no such name"),
        ([{**_GOOD, "expires": "2026-2-30"}], "no such day"),
        ([{**_GOOD, "scopes": ["write"]}], "got 'write'"),
        ([{**_GOOD, "concurrency": -1}], "0 or more"),
        ([{**_GOOD, "tokens_per_minute": -1}], "0 or more"),
        ([_GOOD, {**_GOOD, "sha256": digest_of("y")}], "another caller has the same name"),
        ([_GOOD, {**_GOOD, "name": "other"}], "another caller has the same sha256"),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_without_secrets(callers: list[Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_callers(json.dumps({"callers": callers}, indent=1).encode(), "keys.json")
    assert expected in caught.value.message
    assert caught.value.message.startswith("keys.json:")
    assert "ovms_secret" not in caught.value.message


def test_a_new_file_is_private_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    entry = CallerEntry("shop", Scopes(read=True), sha256=digest_of(new_key()))
    write_key_file(file, [entry])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    write_key_file(file, [entry, CallerEntry("node", Scopes(), certificate="n")])
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [each.name for each in read_key_file(file)] == ["shop", "node"]
    assert list(tmp_path.iterdir()) == [file]


def test_keys_are_long_and_unique() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("ovms_") and len(key) == 5 + 43 for key in keys)
