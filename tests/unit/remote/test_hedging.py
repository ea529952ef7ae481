"""Calling once more what takes long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from ovmstrio.core.errors import InvalidRequest, NotReady, ServerError
from ovmstrio.runtimes.remote.hedging import hedged


class Calls:
    """Calls of which each takes its own time, and answers or fails."""

    def __init__(self, *calls: tuple[float, str | ServerError]) -> None:
        self._calls = iter(calls)
        self.begun = 0
        self.cancelled = 0

    async def __call__(self) -> str:
        """Make the next one."""
        self.begun += 1
        seconds, outcome = next(self._calls)
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if isinstance(outcome, ServerError):
            raise outcome
        return outcome


def _is_final(error: ServerError) -> bool:
    return isinstance(error, InvalidRequest)


async def _run(call: Callable[[], Awaitable[str]]) -> str:
    return await hedged(call, 1, is_final=_is_final)


async def test_a_call_that_answers_soon_is_made_once(autojump_clock: MockClock) -> None:
    """And one that fails soon, too."""
    del autojump_clock
    quick = Calls((0.5, "a"))
    assert await _run(quick) == "a"
    assert quick.begun == 1
    failing = Calls((0.5, NotReady("gone")))
    with pytest.raises(NotReady, match="gone"):
        await _run(failing)
    assert failing.begun == 1


async def test_the_first_answer_counts_and_the_other_call_is_cancelled(autojump_clock: MockClock) -> None:
    """Whichever it is."""
    del autojump_clock
    begun = trio.current_time()
    calls = Calls((100, "slow"), (1, "second"))
    assert await _run(calls) == "second"
    assert (trio.current_time() - begun, calls.begun, calls.cancelled) == (2, 2, 1)
    calls = Calls((1.5, "first"), (100, "slow"))
    assert await _run(calls) == "first"
    assert calls.cancelled == 1


async def test_a_failure_waits_for_the_other_call_unless_it_is_final(autojump_clock: MockClock) -> None:
    """If both fail, what failed first is told."""
    del autojump_clock
    assert await _run(Calls((5, "late"), (1, NotReady("second")))) == "late"
    with pytest.raises(NotReady, match="first"):
        await _run(Calls((2, NotReady("first")), (5, NotReady("second"))))
    calls = Calls((100, "never"), (1, InvalidRequest("wrong")))
    with pytest.raises(InvalidRequest, match="wrong"):
        await _run(calls)
    assert calls.cancelled == 1
