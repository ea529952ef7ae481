"""Tests of models that several tests share."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.support.model_hosts import hosts_of, on_model_loop


@asynccontextmanager
async def serve(**settings: Any) -> AsyncIterator[dict[str, Any]]:
    await trio.lowlevel.checkpoint()
    if "error" in settings:
        raise OSError(settings["error"])
    model = {**settings, "loop": trio.lowlevel.current_trio_token()}
    yield model
    model["closed"] = True


@on_model_loop
async def check(model: dict[str, Any], value: int) -> None:
    """Check that this runs on the loop of the model."""
    assert trio.lowlevel.current_trio_token() is model["loop"]
    assert model["size"] == value


def test_equal_settings_share_a_model() -> None:
    before = threading.active_count()
    with hosts_of(serve) as host_of:
        one, other = host_of(size=1), host_of(size=2)
        assert host_of(size=1) is one
        check(model=one, value=1)
        check(model=other, value=2)
        with pytest.raises(AssertionError):
            check(model=other, value=1)
        assert "closed" not in one.model
    assert one.model["closed"]
    assert other.model["closed"]
    assert threading.active_count() <= before + 2


def test_failed_load_is_raised() -> None:
    with hosts_of(serve) as host_of:
        with pytest.raises(OSError, match="no such model"):
            host_of(error="no such model")
        check(model=host_of(size=3), value=3)


def test_failure_of_the_loop_is_raised_at_the_end() -> None:
    @asynccontextmanager
    async def serve_badly(**_: Any) -> AsyncIterator[dict[str, Any]]:
        async with trio.open_nursery() as nursery:
            yield {"nursery": nursery}

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise OSError("engine lost")

    @on_model_loop
    async def break_down(model: dict[str, Any]) -> None:
        model["nursery"].start_soon(fail)
        await trio.lowlevel.checkpoint()

    with pytest.raises(ExceptionGroup) as caught, hosts_of(serve_badly) as host_of:
        break_down(model=host_of())
    assert caught.group_contains(OSError, match="engine lost")
