"""Metrics of a server whose processes end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest
import trio

from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.dataplane.whole_server import metrics_of_all
from ovmstrio.server.workers.kept_figures import KeptFigures

ROWS = 3


def _text(count: int) -> bytes:
    counter = b"# HELP calls Calls.\n# TYPE calls counter\ncalls %d.0\n" % count
    return counter + b"# HELP now Now.\n# TYPE now gauge\nnow 1.0\n"


@pytest.fixture
def figures() -> KeptFigures:
    """Give those of three processes."""
    return KeptFigures(memoryview(bytearray(KeptFigures.size(ROWS))), ROWS)


class _Others:
    def __init__(self, figures: KeptFigures, answers: dict[int, bytes]) -> None:
        self._figures = figures
        self._answers = answers
        self.others = [1, 2]
        self.ends: int | None = None

    async def ask_soon(self, *_: Any) -> dict[int, bytes]:
        answers = dict(self._answers)
        if self.ends is not None:
            self._figures.add_to_past(self.ends)
            self._answers.pop(self.ends, None)
            self.ends = None
        await trio.lowlevel.checkpoint()
        return answers

    def leave_figures(self, text: bytes, *, is_open: bool) -> None:
        self._figures.leave(0, text, is_open=is_open)

    def past_changes(self, *, is_open: bool) -> int | None:
        return self._figures.changes(is_open=is_open)

    def past_figures(self, answered: Iterable[int], *, is_open: bool) -> list[bytes]:
        return self._figures.past([row for row in (1, 2) if row not in answered], is_open=is_open)


class _Plane:
    def __init__(self, siblings: _Others) -> None:
        self.siblings = siblings

    def render_metrics(self, *_: Any, **__: Any) -> bytes:
        return _text(1)


async def _calls(others: _Others) -> list[bytes]:
    text = await metrics_of_all(cast("DataPlane", _Plane(others)), (), trio.CapacityLimiter(1))
    assert text is not None
    return [line for line in text.splitlines() if not line.startswith(b"#")]


async def test_who_does_not_answer_is_counted_before_anybody_knows_that_it_has_ended(figures: KeptFigures) -> None:
    """And not twice afterwards; what it told of itself as it was is left out."""
    figures.leave(1, _text(10), is_open=False)
    figures.leave(2, _text(100), is_open=False)
    others = _Others(figures, {2: _text(101)})
    assert await _calls(others) == [b"calls 112.0", b"now 2.0"]
    figures.add_to_past(1)
    assert await _calls(others) == [b"calls 112.0", b"now 2.0"]


async def test_of_one_that_is_stuck_counts_what_it_told_last(figures: KeptFigures) -> None:
    """The others' figures are told all the same, and counters do not fall; once it can go on it tells more."""
    answers = {1: _text(10), 2: _text(100)}
    for row, text in answers.items():
        figures.leave(row, text, is_open=False)
    assert await _calls(_Others(figures, answers)) == [b"calls 111.0", b"now 3.0"]
    assert await _calls(_Others(figures, {1: _text(11)})) == [b"calls 112.0", b"now 2.0"]
    assert await _calls(_Others(figures, {1: _text(11), 2: _text(102)})) == [b"calls 114.0", b"now 3.0"]


async def test_who_ends_while_it_is_asked_is_counted_once(figures: KeptFigures) -> None:
    """Whether it has answered or not."""
    figures.leave(2, _text(101), is_open=False)
    others = _Others(figures, {2: _text(101)})
    others.ends = 2
    assert await _calls(others) == [b"calls 102.0", b"now 1.0"]


def test_the_past_is_not_told_of_while_it_changes(figures: KeptFigures, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's figures would be there twice."""
    figures.leave(1, _text(10), is_open=True)
    seen: list[int | None] = []
    leave = figures.leave

    def note(row: int, text: bytes, *, is_open: bool) -> None:
        seen.append(figures.changes(is_open=is_open))
        leave(row, text, is_open=is_open)

    monkeypatch.setattr(figures, "leave", note)
    before = figures.changes(is_open=True)
    figures.add_to_past(1)
    assert seen == [None, None]
    assert None is not figures.changes(is_open=True) != before
