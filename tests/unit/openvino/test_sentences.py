"""Texts as they are cut for who speaks them."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.openvino.engine.sentences import MOST_CHARACTERS, sentences_of


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Ever tried. Ever failed!  No matter?", ["Ever tried.", "Ever failed!", "No matter?"]),
        ('He said "Go." Then he went.', ['He said "Go."', "Then he went."]),
        ("It costs 3.50 at ovms.org now", ["It costs 3.50 at ovms.org now"]),
        ("Dr. Smith and J. Doe, e.g. here, wait. Yes.", ["Dr. Smith and J. Doe, e.g. here, wait.", "Yes."]),
        ("Wait... and see. So", ["Wait... and see.", "So"]),
        ("A title\nA line\n\n- \nThe end", ["A title", "A line", "The end"]),
        ("\u4f60\u597d\u3002\u518d\u89c1\u3002", ["\u4f60\u597d\u3002", "\u518d\u89c1\u3002"]),
        ("a\x00b\tc", ["a b c"]),
        (" ... \n!", []),
        ("5 \u20ac", ["5 \u20ac"]),
    ],
)
def test_a_text_is_cut_behind_its_sentences(text: str, sentences: list[str]) -> None:
    """Not behind abbreviations, within numbers or names, nor where the sentence goes on."""
    assert sentences_of(text) == sentences


def test_a_long_sentence_is_cut_at_a_pause_else_between_words_else_anywhere() -> None:
    """So that nobody waits long for it."""
    clauses = ", ".join(["word " * 20 + "end"] * 5)
    words = "word " * 200
    assert [part.split()[-1] for part in sentences_of(clauses)] == ["end,", "end,", "end"]
    assert {part.split()[-1] for part in sentences_of(words)} == {"word"}
    assert [len(part) for part in sentences_of("x" * 700)] == [300, 300, 100]


@pytest.mark.parametrize("letter", ["\u5b57", "\uac00", "\U0001f602"])
def test_what_is_a_syllable_or_a_word_each_is_cut_earlier(letter: str) -> None:
    """As it is spoken for longer."""
    assert [len(part) for part in sentences_of(letter * 130)] == [60, 60, 10]
    assert [len(part) for part in sentences_of("\u5b57" * 50 + "\uff0c" + "\u5b57" * 20)] == [51, 20]


def test_a_text_of_abbreviations_alone_is_not_read_over_and_over() -> None:
    """Time that grows with the square of the length would be hours for this text, and it is less than a second."""
    started = process_time()
    assert "".join(sentences_of("A. " * 200_000)).count("A") == 200_000
    assert process_time() - started < 60


@given(st.text(alphabet=st.sampled_from("ab1. ,;!?\n\"'()\u2026\u3002"), max_size=1500))
def test_nothing_that_can_be_spoken_is_lost(text: str) -> None:
    """In its order, in parts of a bounded length."""
    parts = sentences_of(text)
    letters = [letter for letter in text if letter.isalnum()]
    assert [letter for letter in "".join(parts) if letter.isalnum()] == letters
    assert all(0 < len(part) <= MOST_CHARACTERS for part in parts)
