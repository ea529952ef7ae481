from __future__ import annotations

import itertools
from collections.abc import Generator
from threading import current_thread, main_thread

import pytest
import trio

from ovmstrio.util import slices
from ovmstrio.util.slices import run_in_slices, run_to_end
from tests.support.waits import WAIT_SECONDS


async def test_two_computations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    now = 0.0

    def compute(name: str) -> Generator[None, None, str]:
        nonlocal now
        for _ in range(20):
            assert current_thread() is not main_thread()
            steps.append(name)
            # Each step takes longer than a turn may.
            now += 1
            yield
        return name

    monkeypatch.setattr(slices, "perf_counter", lambda: now)
    results: list[str] = []

    async def run(name: str) -> None:
        results.append(await run_in_slices(compute(name)))

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "a")
            nursery.start_soon(run, "b")
    assert sorted(results) == ["a", "b"]
    first_end = max(steps.index("a"), steps.index("b"))
    together = steps[first_end : min(len(steps) - steps[::-1].index("a"), len(steps) - steps[::-1].index("b"))]
    assert all(left != right for left, right in itertools.pairwise(together))
    assert (steps.count("a"), steps.count("b")) == (20, 20)


async def test_cancellation_closes_the_computation() -> None:
    closed: list[bool] = []

    def endless() -> Generator[None, None, None]:
        try:
            while True:
                yield
        finally:
            closed.append(True)

    def short() -> Generator[None, None, int]:
        yield
        return 7

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_in_slices, endless())
            assert await run_in_slices(short()) == 7
            nursery.cancel_scope.cancel()
    assert closed == [True]


def _failing() -> Generator[None, None, None]:
    yield
    raise LookupError("missing")


async def test_an_error_of_a_computation_is_raised() -> None:
    with pytest.raises(LookupError, match="missing"):
        await run_in_slices(_failing())
    with pytest.raises(LookupError, match="missing"):
        run_to_end(_failing())
