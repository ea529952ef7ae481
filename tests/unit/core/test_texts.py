"""Texts of others have bounds, and are made once."""

from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.core.errors import ConfigError, InvalidRequest, Problem
from ovmstrio.core.texts import MOST_CHARACTERS, cut, keep_texts, shown, text_of

LONG = "x" * 20_000_000


class Told(Exception):
    """Makes its text itself, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __str__(self) -> str:
        self.times += 1
        return LONG


class Mute(Exception):
    """Cannot tell what is wrong."""

    def __str__(self) -> str:
        raise ValueError("nor why")


def test_a_text_is_cut_and_says_how_long_it_was() -> None:
    """One that fits is left alone."""
    assert cut("y" * MOST_CHARACTERS) == "y" * MOST_CHARACTERS
    assert cut(LONG) == f"{LONG[:MOST_CHARACTERS]}... (20000000 characters)"


@pytest.mark.parametrize(
    "error",
    [
        ValueError(LONG),
        KeyError(LONG),
        RuntimeError("of many", LONG),
        ValueError(list(range(1_000_000))),
        ValueError({LONG: [LONG]}),
        FileNotFoundError(2, "no such file", LONG),
        Told(),
        ExceptionGroup(LONG, [ValueError("x")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_has_a_long_text(error: BaseException) -> None:
    """Wherever the length comes from."""
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
def test_a_short_text_is_the_error_s_own(error: BaseException) -> None:
    """As ``str`` gives it."""
    assert text_of(error) == str(error)


def test_an_error_that_cannot_tell_its_text_has_the_name_of_its_class() -> None:
    """So something is told in any case."""
    assert text_of(Mute()) == "Mute"


def test_a_text_that_code_makes_is_made_once() -> None:
    """By whoever asks first, which is the thread of the code; nobody else waits for it."""
    error, before = Told(), Told()
    error.__cause__ = before
    keep_texts(error)
    assert text_of(error) == text_of(before) == text_of(error)
    assert (error.times, before.times) == (1, 1)


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None]}, "text", b"bytes", (1,), {3}, 7], ids=repr)
def test_a_small_value_is_shown_as_it_is(value: Any) -> None:
    """As ``repr`` gives it."""
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value", [LONG, LONG.encode(), [LONG] * 10, {LONG: 1}, [[0] * 100] * 100, range], ids=type)
def test_a_large_value_is_shown_by_its_beginnings(value: Any) -> None:
    """Without a text of its length on the way."""
    assert len(shown(value)) < MOST_CHARACTERS + 100


def test_the_server_s_errors_are_bounded_but_for_lists_of_problems() -> None:
    """What quotes others is cut; what is wrong with a configuration is told in full."""
    assert len(InvalidRequest(f"got {LONG}").message) < 3 * MOST_CHARACTERS
    problems = [Problem(f"number {number}", "file.json", line=number) for number in range(2000)]
    error = ConfigError(problems)
    assert error.message.count("\n") == 1999
    assert str(error) == error.message
