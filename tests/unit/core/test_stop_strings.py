from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.generation import StopStrings

LETTERS = st.text("ab\N{WHITE SMILING FACE}", max_size=12)


def _ended(pieces: list[str], strings: list[str], *, keeps: bool = False) -> tuple[str, str]:
    stops = StopStrings(strings, keeps=keeps)
    text = "".join(stops.feed(piece) for piece in pieces)
    return text + stops.finish(), stops.found


def _expected(text: str, strings: list[str], *, keeps: bool) -> tuple[str, str]:
    """End a text as the rule says it: at the first place where it ends with a string."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if string and text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end if keeps else end - len(longest)], longest
    return text, ""


@given(
    st.lists(LETTERS, max_size=6), st.lists(st.text("ab\N{WHITE SMILING FACE}", max_size=4), max_size=4), st.booleans()
)
def test_a_text_ends_at_the_same_place_for_all_pieces(pieces: list[str], strings: list[str], keeps: bool) -> None:
    assert _ended(pieces, strings, keeps=keeps) == _expected("".join(pieces), strings, keeps=keeps)


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_only_beginnings_of_stop_strings_are_held_back(text: str, strings: list[str]) -> None:
    stops = StopStrings(strings)
    given_text = ""
    for count, letter in enumerate(text, 1):
        given_text += stops.feed(letter)
        if stops.found:
            break
        held = text[:count].removeprefix(given_text)
        assert not held or any(string.startswith(held) for string in strings)


def test_nothing_is_held_back_without_stop_strings() -> None:
    stops = StopStrings(["", ""])
    assert [stops.feed(piece) for piece in ("a", "", "bc")] == ["a", "", "bc"]
    assert not stops.found


def test_a_long_stop_string_of_one_letter_takes_linear_time() -> None:
    stops = StopStrings(["a" * 20_000 + "b"])
    assert stops.feed("a" * 200_000) == "a" * 180_000
    assert stops.feed("b") == ""
    assert stops.found == "a" * 20_000 + "b"
