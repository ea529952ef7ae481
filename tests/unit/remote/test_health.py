"""What is asked of addresses in between calls, and who is told."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from ovmstrio.core.errors import NotReady
from ovmstrio.core.reconsidering import readiness_reconsidered
from ovmstrio.runtimes.remote.breaker import Breaker
from ovmstrio.runtimes.remote.endpoint import RemoteDescription
from ovmstrio.runtimes.remote.health import watch
from ovmstrio.runtimes.remote.targets import Target
from tests.support.remote_endpoints import FakeEndpoint


class _Restarted(FakeEndpoint):
    """Answers again when it is told to."""

    is_well = False

    async def describe(self) -> RemoteDescription:
        if not self.is_well:
            raise NotReady("gone")
        return await super().describe()

    async def ask_ready(self) -> str:
        return (await self.describe()).platform if not self.is_well else ""


async def test_readiness_is_reconsidered_when_an_address_goes_and_when_it_comes_back(autojump_clock: MockClock) -> None:
    """Whoever waits for the server's readiness sees both, without a call in between."""
    del autojump_clock
    endpoint = _Restarted("a")
    target = Target(endpoint, Breaker(1, 1.0))
    seen: list[str] = []

    async def well(_: Target) -> str:
        return ""

    with readiness_reconsidered(lambda: seen.append(target.obstacle(trio.current_time()))):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, target, "m", 10.0, well)
            await trio.sleep(10.5)
            assert seen == ["a: gone"]
            endpoint.is_well = True
            await trio.sleep(10)
            assert seen == ["a: gone", ""]
            nursery.cancel_scope.cancel()
