from __future__ import annotations

import traceback
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError, InvalidRequest, Problem
from ovmstrio.util.truncation import MOST_CAUSES, MOST_CHARACTERS, bounded, format_error, keep_texts, shown, text_of

LONG = "x" * 20_000_000


class _CountingError(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __str__(self) -> str:
        self.times += 1
        return LONG


class _FailingError(Exception):
    def __str__(self) -> str:
        raise ValueError("nor why")


@pytest.mark.parametrize(
    "error",
    [
        ValueError(LONG),
        KeyError(LONG),
        RuntimeError("of many", LONG),
        ValueError(list(range(1_000_000))),
        ValueError({LONG: [LONG]}),
        FileNotFoundError(2, "no such file", LONG),
        _CountingError(),
        ExceptionGroup(LONG, [ValueError("x")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_texts_of_errors_are_bounded(error: BaseException) -> None:
    assert len(text_of(error)) < MOST_CHARACTERS + 100


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        ValueError("text"),
        ValueError("text", 1),
        ValueError(["a", 1]),
        ValueError(b"bytes"),
        KeyError("key"),
        KeyError(("a", 1)),
        FileNotFoundError(2, "no such file", "name"),
        ExceptionGroup("group", [ValueError("x")]),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
    ],
    ids=repr,
)
def test_a_short_text_of_an_error_is_unchanged(error: BaseException) -> None:
    assert text_of(error) == str(error)


def test_an_error_without_a_text_has_the_name_of_its_class() -> None:
    assert text_of(_FailingError()) == "_FailingError"


def test_the_text_of_an_error_is_made_once() -> None:
    error, before = _CountingError(), _CountingError()
    error.__cause__ = before
    keep_texts(error)
    assert text_of(error) == text_of(before) == text_of(error)
    assert (error.times, before.times) == (1, 1)


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None]}, "text", b"bytes", (1,), {3}, 7], ids=repr)
def test_a_small_value_is_shown_as_its_repr(value: Any) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value", [LONG, LONG.encode(), [LONG] * 10, {LONG: 1}, [[0] * 100] * 100, range], ids=type)
def test_a_large_value_is_shown_truncated(value: Any) -> None:
    assert len(shown(value)) < MOST_CHARACTERS + 100


def test_messages_of_the_server_are_bounded_except_lists_of_problems() -> None:
    assert len(InvalidRequest(f"got {LONG}").message) < 3 * MOST_CHARACTERS
    problems = [Problem(f"number {number}", "file.json", line=number) for number in range(2000)]
    error = ConfigError(problems)
    assert error.message.count("\n") == 1999
    assert str(error) == error.message


# Errors with causes, groups and notes


class _UserError(Exception): ...


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause  # noqa: TRY301 - this is where it comes from
    except BaseException as caught:  # noqa: BLE001 - any class of error
        return caught


def _chain(length: int, text: str = "text") -> BaseException:
    error: BaseException | None = None
    for number in range(length):
        error = _raised(_UserError(f"{number} {text}"), error)
    assert error is not None
    return error


def _recurse(left: int) -> None:
    if not left:
        raise _UserError("at the bottom")
    _recurse(left - 1)


def test_a_small_error_is_formatted_as_python_does() -> None:
    error = _chain(MOST_CAUSES)
    assert bounded(error) is error
    assert format_error(error) == "".join(traceback.format_exception(error))


def test_only_a_long_text_is_truncated() -> None:
    error = _raised(_UserError(LONG), _raised(KeyError("first")))
    text = format_error(error)
    cut_text = LONG[:MOST_CHARACTERS] + "... (20000000 characters)"
    assert text == "".join(traceback.format_exception(error)).replace(LONG, cut_text)


def test_the_last_errors_of_a_chain_are_kept() -> None:
    text = format_error(_chain(1000))
    kept = [line for line in text.splitlines() if line.startswith("tests.") or "_UserError:" in line]
    assert [line.rpartition(": ")[2] for line in kept] == [f"{number} text" for number in range(990, 1000)]
    assert text.count("left out") == 1


def test_each_error_of_a_circle_is_formatted_once() -> None:
    one, other = _UserError(LONG), _UserError("other")
    one.__cause__, other.__cause__ = other, one
    assert format_error(one).count("_UserError: ") == 2


def test_the_first_and_last_frames_are_kept() -> None:
    try:
        _recurse(500)
    except _UserError as error:
        text = format_error(error)
    assert "at the bottom" in text
    assert "in test_the_first" in text
    assert text.count("\n") < 200


def test_groups_are_bounded_like_chains() -> None:
    group: Exception = ExceptionGroup("wide", [_UserError(f"{number} {LONG[:10_000]}") for number in range(1000)])
    for _ in range(5):
        group = ExceptionGroup("deep", [group, ValueError("beside")])
    text = format_error(group)
    assert text.count("ExceptionGroup: deep") == 5
    assert "further errors are left out" in text
    assert len(text) < 2 * MOST_CAUSES * MOST_CHARACTERS


def test_notes_are_bounded_in_number_and_length() -> None:
    error = _UserError("noted")
    for number in range(100):
        error.add_note(f"{number} {LONG[:100_000]}")
    text = format_error(_raised(error))
    assert "90 notes are left out" in text
    assert len(text) < 20 * MOST_CHARACTERS


error_trees = st.recursive(
    st.builds(_UserError, st.sampled_from(["short", LONG[:10_000]])),
    lambda inner: st.builds(ExceptionGroup, st.text(max_size=5), st.lists(inner, min_size=1)),
    max_leaves=40,
)


@settings(max_examples=40)
@given(st.lists(error_trees, min_size=1, max_size=15), st.data())
def test_any_graph_of_errors_is_bounded(graph: list[Exception], data: st.DataObject) -> None:
    for error in graph:
        if data.draw(st.booleans()):
            error.__cause__ = data.draw(st.sampled_from(graph))
        if data.draw(st.booleans()):
            error.__context__ = data.draw(st.sampled_from(graph))
    text = format_error(graph[0])
    assert text.count("_UserError: ") <= MOST_CAUSES
    assert len(text) < 3 * MOST_CAUSES * MOST_CHARACTERS
