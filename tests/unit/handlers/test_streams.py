"""Generators of handlers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.core.errors import UserCodeError
from ovmstrio.work.user_code.pumps import CREDIT
from tests.support.projects import opened
from tests.support.waits import until_async

NUMBERS = """
    class Handler:
        made = 0
        closed = False
        {prefix}def handle_get(self, query_params):
            try:
                while self.made < query_params:
                    self.made += 1
                    yield self.made
                raise ValueError("no more")
            finally:
                self.closed = True
    """
PREFIXES = pytest.mark.parametrize("prefix", ["", "async "])


async def first(stream: Any, count: int) -> list[Any]:
    """Take some values."""
    return [await anext(stream) for _ in range(count)]


@PREFIXES
async def test_the_values_of_a_generator(tmp_path: Path, prefix: str) -> None:
    """In their order; what it raises afterwards comes as every error does, once."""
    async with opened(tmp_path, NUMBERS.format(prefix=prefix)) as handler:
        stream = await handler.iterate("handle_get", int, query_params=100)
        assert await first(stream, 100) == list(range(1, 101))
        with capture_logs() as logs, pytest.raises(UserCodeError) as caught:
            await anext(stream)
        assert caught.value.detail == "ValueError: no more (handler.py:10)"
        assert len(logs) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()


async def test_a_generator_runs_a_bounded_number_of_values_ahead(tmp_path: Path) -> None:
    """And holds no thread while nobody takes them."""
    async with opened(tmp_path, NUMBERS.format(prefix="")) as handler:
        stream = await handler.iterate("handle_get", int, query_params=10**9)
        assert await first(stream, 1) == [1]
        await until_async(lambda: handler.instance.made >= CREDIT)
        assert await handler.run_in_thread(lambda: 7) == 7
        assert handler.instance.made <= CREDIT + 1
        await stream.aclose()
        await until_async(lambda: handler.instance.closed)


@PREFIXES
async def test_a_generator_is_closed_when_its_caller_leaves(tmp_path: Path, prefix: str) -> None:
    """Closing twice does nothing more."""
    async with opened(tmp_path, NUMBERS.format(prefix=prefix)) as handler:
        stream = await handler.iterate("handle_get", int, query_params=10**9)
        await first(stream, 3)
        await stream.aclose()
        await stream.aclose()
        await until_async(lambda: handler.instance.closed)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_caller_does_not_wait_for_the_step_that_a_generator_is_in(tmp_path: Path) -> None:
    """The generator is closed when the step has ended."""
    code = """
        import threading
        class Handler:
            def __init__(self):
                self.wait = threading.Event()
                self.closed = threading.Event()
            def handle_get(self):
                try:
                    self.wait.wait(60)
                    yield 1
                finally:
                    self.closed.set()
        """
    async with opened(tmp_path, code) as handler:
        stream = await handler.iterate("handle_get", int)
        with trio.move_on_after(0.01) as scope:
            await anext(stream)
        await stream.aclose()
        assert scope.cancelled_caught
        instance: Any = handler.instance
        assert not instance.closed.is_set()
        instance.wait.set()
        await until_async(instance.closed.is_set)


async def test_anything_can_be_iterated(tmp_path: Path) -> None:
    """Lists, too; what cannot is the handler's fault."""
    code = """
        class Handler:
            def handle_get(self):
                return [1, 2]
            def handle_put(self):
                return 7
        """
    async with opened(tmp_path, code) as handler:
        assert [value async for value in await handler.iterate("handle_get", int)] == [1, 2]
        with pytest.raises(UserCodeError) as caught:
            await handler.iterate("handle_put", int)
        assert "found a int" in caught.value.detail


async def test_plain_generators_run_in_the_handlers_threads(tmp_path: Path) -> None:
    """And async ones on the loop."""
    code = """
        import threading
        class Handler:
            def handle_get(self):
                yield threading.get_ident()
            async def handle_put(self):
                yield threading.get_ident()
        """
    async with opened(tmp_path, code) as handler:
        (plain,) = [value async for value in await handler.iterate("handle_get", int)]
        (on_loop,) = [value async for value in await handler.iterate("handle_put", int)]
        assert plain == await handler.run_in_thread(threading.get_ident)
        assert on_loop == threading.get_ident()


async def test_a_generator_whose_closing_fails_is_logged(tmp_path: Path) -> None:
    """Nobody else would hear of it."""
    code = """
        class Handler:
            async def handle_get(self):
                try:
                    yield 1
                finally:
                    raise ValueError("while closing")
        """
    async with opened(tmp_path, code) as handler:
        stream = await handler.iterate("handle_get", int)
        await anext(stream)
        with capture_logs() as logs:
            await stream.aclose()
    assert [entry["error"] for entry in logs] == ["ValueError: while closing (handler.py:7)"]


async def test_models_are_leased_to_the_end_of_a_stream(tmp_path: Path) -> None:
    """Whichever way it ends."""
    code = """
        from ovmstrio.runtimes.handlers.models.leases import current_call
        class Handler:
            released = 0
            def handle_get(self, query_params):
                current_call().hold("model", self.release)
                for number in range(query_params):
                    yield number
            def release(self, held):
                self.released += 1
        """
    async with opened(tmp_path, code) as handler:
        stream = await handler.iterate("handle_get", int, query_params=10**9)
        await first(stream, 100)
        assert handler.instance.released == 0
        await stream.aclose()
        assert handler.instance.released == 1
        assert [value async for value in await handler.iterate("handle_get", int, query_params=3)] == [0, 1, 2]
        assert handler.instance.released == 2


@PREFIXES
async def test_a_value_that_cannot_be_converted_closes_the_generator(tmp_path: Path, prefix: str) -> None:
    """It would go on if it was asked."""

    def refuse(value: int) -> int:
        if value == 2:
            raise UserCodeError("wrong", detail="wrong")
        return value

    async with opened(tmp_path, NUMBERS.format(prefix=prefix)) as handler:
        stream = await handler.iterate("handle_get", refuse, query_params=10**9)
        with capture_logs():
            assert await anext(stream) == 1
            with pytest.raises(UserCodeError):
                await anext(stream)
        assert handler.instance.closed
        await stream.aclose()
