"""Texts that end at stop strings, however they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.stop_strings import StopStrings

LETTERS = st.text("ab\N{WHITE SMILING FACE}", max_size=12)


def _ended(pieces: list[str], strings: list[str], *, keeps: bool = False) -> tuple[str, bool]:
    stops = StopStrings(strings, keeps=keeps)
    text = "".join(stops.feed(piece) for piece in pieces)
    return text + stops.finish(), stops.has_stopped


def _slowly(text: str, strings: list[str], *, keeps: bool) -> tuple[str, bool]:
    """End a text as the rule says it: at the first place where it ends with a string."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if string and text[:end].endswith(string)]
        if found:
            return text[: end if keeps else end - max(map(len, found))], True
    return text, False


@given(
    st.lists(LETTERS, max_size=6), st.lists(st.text("ab\N{WHITE SMILING FACE}", max_size=4), max_size=4), st.booleans()
)
def test_a_text_ends_at_the_same_place_however_it_is_cut(pieces: list[str], strings: list[str], keeps: bool) -> None:
    """The answer is that of the plain rule over the whole text."""
    assert _ended(pieces, strings, keeps=keeps) == _slowly("".join(pieces), strings, keeps=keeps)


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_was_given_is_never_part_of_a_stop_string_and_no_more_is_held_than_must_be(
    text: str, strings: list[str]
) -> None:
    """What is held back begins a stop string."""
    stops = StopStrings(strings)
    given_text = ""
    for count, letter in enumerate(text, 1):
        given_text += stops.feed(letter)
        if stops.has_stopped:
            break
        held = text[:count].removeprefix(given_text)
        assert not held or any(string.startswith(held) for string in strings)


def test_nothing_is_held_back_where_there_is_no_stop_string() -> None:
    """Every piece is given as it comes."""
    stops = StopStrings(["", ""])
    assert [stops.feed(piece) for piece in ("a", "", "bc")] == ["a", "", "bc"]
    assert not stops.has_stopped


@pytest.mark.parametrize(("keeps", "expected"), [(False, "one "), (True, "one END")])
def test_nothing_comes_behind_the_stop_string(*, keeps: bool, expected: str) -> None:
    """What follows it, in the same piece and in later ones, is dropped."""
    assert _ended(["one E", "ND two", " three"], ["END"], keeps=keeps) == (expected, True)


def test_a_long_stop_string_of_one_letter_costs_no_more_than_its_length() -> None:
    """The beginning that is there is followed, not looked for anew with every letter."""
    stops = StopStrings(["a" * 20_000 + "b"])
    assert stops.feed("a" * 200_000) == "a" * 180_000
    assert stops.feed("b") == ""
    assert stops.has_stopped
