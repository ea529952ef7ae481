"""Errors are written down in a bounded time and space, whatever was raised."""

from __future__ import annotations

import traceback

from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.bounded_errors import bounded, format_error
from ovmstrio.core.texts import MOST_CAUSES, MOST_CHARACTERS

LONG = "x" * 20_000_000


class Own(Exception):
    """A class of a user's."""


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Raise an error, so that it has a traceback."""
    try:
        raise error from cause  # noqa: TRY301 - this is where it comes from
    except BaseException as caught:  # noqa: BLE001 - whatever it is
        return caught


def chain(length: int, text: str = "text") -> BaseException:
    """Make errors that came from each other; the last one is ``length - 1``."""
    error: BaseException | None = None
    for number in range(length):
        error = raised(Own(f"{number} {text}"), error)
    assert error is not None
    return error


def deep(left: int) -> None:
    """Fail so many calls down."""
    if not left:
        raise Own("at the bottom")
    deep(left - 1)


def test_what_is_small_is_written_as_python_writes_it() -> None:
    """It is the error itself."""
    error = chain(MOST_CAUSES)
    assert bounded(error) is error
    assert format_error(error) == "".join(traceback.format_exception(error))


def test_a_long_text_is_cut_and_the_rest_is_as_it_was() -> None:
    """The name of the class, the frames and what it came from."""
    error = raised(Own(LONG), raised(KeyError("first")))
    text = format_error(error)
    expected = "".join(traceback.format_exception(error)).replace(
        LONG, LONG[:MOST_CHARACTERS] + "... (20000000 characters)"
    )
    assert text == expected


def test_of_a_chain_the_last_errors_are_told() -> None:
    """And that there were others."""
    text = format_error(chain(1000))
    told = [line for line in text.splitlines() if line.startswith("tests.") or "Own:" in line]
    assert [line.rpartition(": ")[2] for line in told] == [f"{number} text" for number in range(990, 1000)]
    assert text.count("left out") == 1


def test_a_circle_of_errors_is_told_once() -> None:
    """Python lets errors come from each other."""
    one, other = Own(LONG), Own("other")
    one.__cause__, other.__cause__ = other, one
    assert format_error(one).count("Own: ") == 2


def test_of_many_frames_the_first_and_the_last_are_told() -> None:
    """As after a recursion without end."""
    try:
        deep(500)
    except Own as error:
        text = format_error(error)
    assert "at the bottom" in text
    assert "test_of_many_frames" in text
    assert text.count("\n") < 200


def test_groups_are_told_with_as_many_errors_as_chains() -> None:
    """However wide and deep they are."""
    group: Exception = ExceptionGroup("wide", [Own(f"{number} {LONG[:10_000]}") for number in range(1000)])
    for _ in range(5):
        group = ExceptionGroup("deep", [group, ValueError("beside")])
    text = format_error(group)
    assert text.count("ExceptionGroup: deep") == 5
    assert "further errors are left out" in text
    assert len(text) < 2 * MOST_CAUSES * MOST_CHARACTERS


def test_notes_are_cut() -> None:
    """In number and length."""
    error = Own("noted")
    for number in range(100):
        error.add_note(f"{number} {LONG[:100_000]}")
    text = format_error(raised(error))
    assert "90 notes are left out" in text
    assert len(text) < 20 * MOST_CHARACTERS


def test_long_arguments_and_long_chains_are_formatted_in_bounded_space() -> None:
    """20 MB of text, 20 GB of text in a list, and long texts in a thousand errors."""
    for error in (raised(Own(LONG)), raised(RuntimeError([LONG] * 1000)), chain(1000, LONG[:20_000])):
        assert len(format_error(error)) < 2 * MOST_CAUSES * MOST_CHARACTERS


errors = st.recursive(
    st.builds(Own, st.sampled_from(["short", LONG[:10_000]])),
    lambda inner: st.builds(ExceptionGroup, st.text(max_size=5), st.lists(inner, min_size=1)),
    max_leaves=40,
)


@settings(max_examples=40)
@given(st.lists(errors, min_size=1, max_size=15), st.data())
def test_any_tangle_of_errors_is_bounded(tangle: list[Exception], data: st.DataObject) -> None:
    """Causes and contexts may lead anywhere."""
    for error in tangle:
        if data.draw(st.booleans()):
            error.__cause__ = data.draw(st.sampled_from(tangle))
        if data.draw(st.booleans()):
            error.__context__ = data.draw(st.sampled_from(tangle))
    text = format_error(tangle[0])
    assert text.count("Own: ") <= MOST_CAUSES
    assert len(text) < 3 * MOST_CAUSES * MOST_CHARACTERS
