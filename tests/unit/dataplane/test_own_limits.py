"""Services that limit their calls themselves are asked before bodies are read, and again for who has no place yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from ovmstrio.api.doors import HANDLERS_HTTP
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import Overloaded, TooManyRequests
from ovmstrio.core.limits import LocalLimit, current_place
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.metrics import Metrics
from tests.support.stub_registry import StubServable, registry_of


class Counted(StubServable):
    """A service with a limit of its own."""

    def __init__(self, spec: ModelSpec, version: int, limit: LocalLimit) -> None:
        super().__init__(spec, version)
        self.concurrency_limit = limit


@asynccontextmanager
async def _plane(folder: Path, limit: LocalLimit, **limits: int) -> AsyncIterator[DataPlane]:
    async def load(spec: ModelSpec, version: int, directory: Path) -> Counted:
        return Counted(spec, version, limit)

    registry = registry_of(load, poll_seconds=0)
    plane = DataPlane(registry, metrics=Metrics())
    (folder / "s" / "1").mkdir(parents=True)
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply([ModelSpec(name="s", base_path=folder / "s", **limits)])
        yield plane
        await registry.apply([])
        nursery.cancel_scope.cancel()
    assert not plane.has_limits()


def _told(plane: DataPlane) -> str:
    return (plane.render_metrics() or b"").decode()


async def test_a_place_is_one_of_the_service_s_own_and_is_passed_on_to_the_call(tmp_path: Path) -> None:
    """It is counted once, until the call ends, which may be before its place is given back, and refused once more."""
    limit = LocalLimit(1)
    async with _plane(tmp_path, limit) as plane:
        assert plane.has_limits()
        place = await plane.admit("s", "", HANDLERS_HTTP, "POST")
        assert place is not None
        assert limit.in_flight == 1
        with pytest.raises(TooManyRequests, match="1 requests are in flight already, which is max_concurrency"):
            await plane.admit("s", "", HANDLERS_HTTP, "POST")
        current_place.set(place)
        with await plane.call("s", HANDLERS_HTTP, "POST"):
            assert limit.in_flight == 1
        assert limit.in_flight == 0
        place.release()
        assert limit.in_flight == 0
        assert 'ovmstrio_refused_requests_total{name="s"} 1.0' in _told(plane)
        assert 'code="TooManyRequests"' in _told(plane)


async def test_a_place_that_no_call_has_come_to_use_is_free_again(tmp_path: Path) -> None:
    """Such as that of a request whose body never came."""
    limit = LocalLimit(1)
    async with _plane(tmp_path, limit) as plane:
        for _ in range(3):
            place = await plane.admit("s", "", HANDLERS_HTTP, "POST")
            assert place is not None
            place.release()
            place.release()
        assert limit.in_flight == 0


async def test_an_entry_s_limit_comes_first_and_is_given_back_by_who_is_refused(tmp_path: Path) -> None:
    """Its queue is one that a project has not; what the project refuses has no place of the entry's either."""
    limit = LocalLimit(1)
    async with _plane(tmp_path, limit, max_concurrency=2, max_queue=0) as plane:
        with await plane.call("s", HANDLERS_HTTP, "POST"):
            with pytest.raises(TooManyRequests):
                await plane.call("s", HANDLERS_HTTP, "POST")
            assert limit.in_flight == 1
        limit.maximum = 3
        with await plane.call("s", HANDLERS_HTTP, "POST"), await plane.call("s", HANDLERS_HTTP, "POST"):
            with pytest.raises(Overloaded, match="and may have 2"):
                await plane.call("s", HANDLERS_HTTP, "POST")
            assert limit.in_flight == 2
    assert limit.in_flight == 0


async def test_calls_without_a_number_are_counted_and_take_no_place(tmp_path: Path) -> None:
    """As those of one of many processes are, which tells the others; what is free of limits is not."""
    limit = LocalLimit(0)
    async with _plane(tmp_path, limit) as plane:
        assert not plane.has_limits()
        with await plane.call("s", HANDLERS_HTTP, "POST"), await plane.call("s", HANDLERS_HTTP, "GET", is_free=True):
            assert limit.in_flight == 1
        assert limit.in_flight == 0
