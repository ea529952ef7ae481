from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.runtimes.resident import ResidentService, host


class _Block:
    """A block that may fail where it is entered, and ends with an error where it is told to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.fails = trio.Event()
        self.ended = trio.Event()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[ResidentService]:
        """Give a service beside a task that may fail."""
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


async def test_a_block_lives_until_its_service_is_closed() -> None:
    """The service is given once the block is entered, and closing it returns when the block has ended."""
    async with trio.open_nursery() as tasks:
        block = _Block()
        service = await host(tasks, block.opened(), kind="op pipeline", name="one")
        assert not block.ended.is_set()
        await service.aclose()
        assert block.ended.is_set()


@pytest.mark.parametrize(
    ("failure", "told"),
    [(ConfigError([Problem("nothing there")]), "nothing there"), (KeyError("x"), "KeyError: 'x'")],
    ids=["error of the server", "any other"],
)
async def test_a_block_that_cannot_be_entered(failure: Exception, told: str) -> None:
    """Why is raised to who asked for it, and the tasks beside it go on."""
    async with trio.open_nursery() as tasks:
        other = await host(tasks, _Block().opened(), kind="handler", name="other")
        with pytest.raises((ConfigError, ModelFailure), match=told):
            await host(tasks, _Block(failure).opened(), kind="handler", name="one")
        await other.aclose()


async def test_a_block_that_fails_later(capsys: pytest.CaptureFixture[str]) -> None:
    """What it raises while it lives is logged, reaches nobody else, and closing its service returns at once."""
    async with trio.open_nursery() as tasks:
        other = _Block()
        await host(tasks, other.opened(), kind="handler", name="other")
        block = _Block()
        service = await host(tasks, block.opened(), kind="op pipeline", name="one")
        block.fails.set()
        await block.ended.wait()
        await service.aclose()
        assert not other.ended.is_set()
        tasks.cancel_scope.cancel()
    assert "an op pipeline has ended" in capsys.readouterr().out
