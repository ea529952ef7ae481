"""Errors as plain data and back."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError, Overloaded, Problem, ServerError
from ovmstrio.core.texts import MOST_CAUSES, MOST_CHARACTERS
from ovmstrio.work.messages.error_codec import decode_error, encode_error
from ovmstrio.work.messages.value_codec import Encoded, decode
from ovmstrio.work.user_code.places import place_in


def turned(error: BaseException) -> BaseException:
    """Write an error and read it."""
    encoded = Encoded(encode_error(error))
    memory = bytearray(encoded.size)
    encoded.write(memoryview(memory))
    return decode_error(decode(memoryview(memory)))


def raised(error: BaseException) -> BaseException:
    """Give an error with a traceback."""
    try:
        raise error  # noqa: TRY301 - as said
    except BaseException as caught:  # noqa: BLE001 - that is what this is for
        return caught


class Own(Overloaded):
    """An error of a user's that has a status."""


class Odd(Exception):
    def __init__(self, one: int, two: object) -> None:
        super().__init__(f"{one} and more")
        self.two = two


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text"), KeyError("key"), ValueError(), SystemExit(3), KeyboardInterrupt(), StopIteration(5),
        OSError(2, "nothing", "/file"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), ZeroDivisionError("by zero"),
        Overloaded("later", retry_after_seconds=9), ConfigError([Problem("wrong", "f", 3, found="x")]),
        ExceptionGroup("many", [ValueError("one"), ExceptionGroup("more", [KeyError(2)])]),
        ModuleNotFoundError("no x", name="x", path="p"), RuntimeError("two", 2, None, (1, "x")),
    ],
)  # fmt: skip
def test_errors_of_python_and_of_the_server_stay_what_they_are(error: BaseException) -> None:
    """Class, text, arguments, attributes, and the lines of the traceback."""
    given_error = raised(error)
    found = turned(given_error)
    assert (type(found), str(found)) == (type(error), str(error))
    plain = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    assert {name: getattr(found, name) for name in plain} == plain
    assert getattr(found, "name", None) == getattr(error, "name", None)
    (line,) = traceback.extract_tb(found.__traceback__)
    (expected,) = traceback.extract_tb(given_error.__traceback__)
    assert (line.filename, line.lineno, line.name, line.line) == (
        expected.filename, expected.lineno, expected.name, expected.line,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "base"),
    [(Own("later", retry_after_seconds=7), Overloaded), (Odd(1, object()), Exception), (Mute(), Exception)],
)
def test_an_error_of_a_users_own_is_one_of_the_nearest_class_that_is_known(
    error: BaseException, base: type[BaseException]
) -> None:
    """Under its own name, with what of it is plain."""
    found = turned(error)
    assert type(found).__name__ == type(error).__name__
    assert type(found).__bases__ == (base,)
    assert getattr(found, "retry_after_seconds", None) == getattr(error, "retry_after_seconds", None)
    assert str(found) == ("Mute" if isinstance(error, Mute) else str(error))


def test_an_error_of_a_library_keeps_its_text() -> None:
    """And is caught as what it was derived from."""
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    found = turned(caught.value)
    assert (type(found).__name__, isinstance(found, ValueError)) == ("JSONDecodeError", True)
    assert str(found) == str(caught.value)


def test_what_it_came_from_comes_along() -> None:
    """Causes and contexts, as far as they are told, with their lines; and notes."""
    try:
        try:
            raise KeyError("inner")  # noqa: TRY301 - what is raised from it is what is looked at
        except KeyError as inner:
            raise RuntimeError("outer") from inner
    except RuntimeError as error:
        error.add_note("a note")
        found = turned(error)
    assert isinstance(found.__cause__, KeyError)
    assert found.__suppress_context__
    assert found.__notes__ == ["a note"]
    assert place_in(__import__("pathlib").Path(__file__).parent, found.__cause__) is not None


def test_long_texts_and_long_chains_are_cut() -> None:
    """Nothing of a user's makes a message large."""
    error: BaseException = ValueError("x" * 10**6)
    for number in range(1000):
        outer = ValueError(number)
        outer.__cause__ = error
        error = outer
    assert Encoded(encode_error(error)).size < 10**5
    assert Encoded(encode_error(ValueError("x" * 10**6))).size < 4 * MOST_CHARACTERS
    chain, found = 0, turned(error)
    while found.__cause__ is not None:
        chain, found = chain + 1, found.__cause__
    assert chain == MOST_CAUSES


def test_a_deep_traceback_is_cut_in_its_middle() -> None:
    """Its beginning and its end are told."""

    def deep(left: int) -> None:
        if not left:
            raise ValueError("at the end")
        deep(left - 1)

    try:
        deep(500)
    except ValueError as error:
        lines = traceback.extract_tb(turned(error).__traceback__)
    assert 10 < len(lines) < 100
    assert (lines[0].name, lines[-1].line) == (
        "test_a_deep_traceback_is_cut_in_its_middle",
        'raise ValueError("at the end")',
    )


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@given(st.fixed_dictionaries(dict.fromkeys(encode_error(ValueError()), JUNK)))
def test_what_a_mad_process_says_is_refused_or_an_error(data: dict[str, Any]) -> None:
    """Nothing else comes of it, and nothing is imported for it."""
    try:
        error = decode_error(data)
    except (ValueError, LookupError, TypeError, RecursionError, AttributeError):
        return
    assert isinstance(error, BaseException)
    assert not isinstance(error, ServerError)
