from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.runtimes.resident import ResidentService, host


class _Block:
    """A block that may fail where it is entered, and ends with an error where it is message to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.fails = trio.Event()
        self.ended = trio.Event()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[ResidentService]:
        try:
            async with trio.open_nursery() as nursery:
                if self.failure is not None:
                    raise self.failure
                nursery.start_soon(self._fail)
                yield ResidentService()
                nursery.cancel_scope.cancel()
        finally:
            self.ended.set()

    async def _fail(self) -> None:
        await self.fails.wait()
        raise LookupError("gone")


@pytest.mark.parametrize(
    ("failure", "message"),
    [(ConfigError([Problem("nothing there")]), "nothing there"), (KeyError("x"), "KeyError: 'x'")],
    ids=["error of the server", "any other"],
)
async def test_block_that_cannot_be_entered_raises_its_error(failure: Exception, message: str) -> None:
    async with trio.open_nursery() as tasks:
        other = await host(tasks, _Block().opened(), kind="handler", name="other")
        with pytest.raises((ConfigError, ModelFailure), match=message):
            await host(tasks, _Block(failure).opened(), kind="handler", name="one")
        await other.aclose()


async def test_block_ends_with_its_service_or_alone_with_a_logged_failure(capsys: pytest.CaptureFixture[str]) -> None:
    async with trio.open_nursery() as tasks:
        other, failing = _Block(), _Block()
        lasting = await host(tasks, other.opened(), kind="handler", name="other")
        service = await host(tasks, failing.opened(), kind="op pipeline", name="one")
        failing.fails.set()
        await failing.ended.wait()
        await service.aclose()
        assert not other.ended.is_set()
        await lasting.aclose()
        assert other.ended.is_set()
    assert "an op pipeline has ended" in capsys.readouterr().out
