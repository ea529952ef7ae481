"""Tokens of reasoning are counted alike, however they are joined on their way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.generation import Conversation, Finish
from ovmstrio.runtimes.generation.answers import Made
from ovmstrio.runtimes.generation.output_reading import AnswerReading

_THOUGHT = ["<think>", "\n", "hm", ",", "", " so", "\n", "</think>", "\n\n"]
_SAID = ["I", " look", ".", " <", " done"]


def _counted(parts: list[str], joined: list[int], reasoning: str, *, opened: bool = False) -> tuple[int, int]:
    """Give how many tokens are reasoning, and how many there are, with each part a token."""
    reading = AnswerReading(Conversation(()), "none", reasoning)
    reading.begin("<think>\n" if opened else "")
    counted = tokens = place = 0
    for number in [*joined, len(parts)]:
        made = Made(0, parts=[(part, 1) for part in parts[place : place + number]])
        made.tokens = len(made.parts)
        place += number
        if place >= len(parts):
            made.finish = Finish.STOP
        reading.feed(made)
        while (piece := reading.next()) is not None:
            counted += piece.reasoning_tokens
            tokens += piece.tokens
        if made.finish:
            break
    return counted, tokens


@given(st.lists(st.integers(1, 4), max_size=12))
def test_reasoning_ends_with_the_blanks_behind_its_mark(joined: list[int]) -> None:
    """Marks belong to it; what comes then is the answer."""
    parts = _THOUGHT + _SAID
    assert _counted(parts, joined, "qwen3") == (len(_THOUGHT), len(parts))
    assert _counted(parts[1:], joined, "qwen3", opened=True) == (len(_THOUGHT) - 1, len(parts) - 1)


@given(st.lists(st.integers(1, 4), max_size=12))
def test_a_text_without_reasoning_has_none(joined: list[int]) -> None:
    """Nor has one that only looks like it, or is not to be read."""
    assert _counted(_SAID, joined, "qwen3") == (0, len(_SAID))
    assert _counted(["<thin", "g>", *_SAID], joined, "qwen3") == (0, len(_SAID) + 2)
    assert _counted(_THOUGHT + _SAID, joined, "none") == (0, len(_THOUGHT + _SAID))


def test_a_text_that_ends_while_it_reasons_is_all_reasoning() -> None:
    """Each of its tokens counts."""
    assert _counted(_THOUGHT[:5], [], "qwen3") == (5, 5)
