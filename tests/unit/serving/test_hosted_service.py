from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.serving.hosted_service import HostedService, host_service


@asynccontextmanager
async def _block(
    fails: trio.Event, ended: trio.Event, failure: Exception | None = None
) -> AsyncIterator[HostedService]:
    async def fail() -> None:
        await fails.wait()
        raise LookupError("gone")

    try:
        async with trio.open_nursery() as nursery:
            if failure is not None:
                raise failure
            nursery.start_soon(fail)
            yield HostedService()
            nursery.cancel_scope.cancel()
    finally:
        ended.set()


@pytest.mark.parametrize(
    ("failure", "message"),
    [(ConfigError([Problem("nothing there")]), "nothing there"), (KeyError("x"), "KeyError: 'x'")],
    ids=["error of the server", "any other"],
)
async def test_block_that_cannot_be_entered_raises_its_error(failure: Exception, message: str) -> None:
    async with trio.open_nursery() as tasks:
        other = await host_service(tasks, _block(trio.Event(), trio.Event()), kind="handler", name="other")
        with pytest.raises((ConfigError, ModelFailure), match=message):
            await host_service(tasks, _block(trio.Event(), trio.Event(), failure), kind="handler", name="one")
        await other.aclose()


async def test_block_ends_with_its_service_or_alone_with_a_logged_failure(capsys: pytest.CaptureFixture[str]) -> None:
    async with trio.open_nursery() as tasks:
        fails, ended, other_ended = trio.Event(), trio.Event(), trio.Event()
        lasting = await host_service(tasks, _block(trio.Event(), other_ended), kind="handler", name="other")
        service = await host_service(tasks, _block(fails, ended), kind="op pipeline", name="one")
        fails.set()
        await ended.wait()
        await service.aclose()
        assert not other_ended.is_set()
        await lasting.aclose()
        assert other_ended.is_set()
    assert "op pipeline failed" in capsys.readouterr().out
