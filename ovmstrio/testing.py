"""Servers, clients and a clock for tests of programs that use ovmstrio.

``serving`` runs a server in a thread of the test's process, on free ports of this machine. ``serving_in_memory`` runs
a server in the test's own trio loop, without sockets.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import anyio.abc
import anyio.to_thread
import structlog
import trio
import trio.testing

from ovmstrio.client import AsyncClient, Client
from ovmstrio.core.errors import ConfigError
from ovmstrio.server.plan import read_plan
from ovmstrio.server.running import Running
from ovmstrio.server.server import serve_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.target import settings_of
from ovmstrio.server.worker_context import WorkerProcessContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from ovmstrio.server.plan import Plan

__all__ = ["FakeClock", "LocalServer", "MemoryServer", "serving", "serving_async", "serving_in_memory"]

_READY_SECONDS: Final = 60.0
_ANY_PORT: Final = ("127.0.0.1:0",)


class FakeClock(trio.abc.Clock):
    """Clock of a trio loop that passes as usual, and faster by ``advance``.

    For code of your own that needs no thread, ``trio.testing.MockClock(autojump_threshold=0)`` skips all waits.
    """

    def __init__(self) -> None:
        self._offset_seconds = 0.0

    def start_clock(self) -> None:
        """Do nothing."""

    def current_time(self) -> float:
        """Return the time of the clock in seconds."""
        return time.perf_counter() + self._offset_seconds

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return the seconds to a deadline."""
        return deadline - self.current_time()

    def advance(self, seconds: float) -> None:
        """Advance the clock, in the clock's own loop; of a running server use ``LocalServer.advance``."""
        self._offset_seconds += seconds


@dataclass(frozen=True, slots=True)
class LocalServer:
    """Running server.

    Attributes:
        grpc: URL for gRPC.
        rest: URL for REST.
    """

    grpc: str
    rest: str
    _run_in_loop: Callable[..., Any] = field(repr=False)
    _clock: FakeClock | None = field(repr=False)

    def client(self, *, rest: bool = False, **options: Any) -> Client:
        """Return a client; ``options`` are those of ``Client``."""
        return Client(self.rest if rest else self.grpc, **options)

    def async_client(self, *, rest: bool = False, **options: Any) -> AsyncClient:
        """Return a client for trio and asyncio; ``options`` are those of ``AsyncClient``."""
        return AsyncClient(self.rest if rest else self.grpc, **options)

    def advance(self, seconds: float) -> None:
        """Advance the time of the server: timeouts, idle sequences, sleeps of ``async def`` handlers.

        Raises:
            RuntimeError: the server has no ``FakeClock``.
        """
        if self._clock is None:
            raise RuntimeError("the server has no fake clock: serving(..., clock=FakeClock())")
        self._run_in_loop(self._clock.advance, seconds)


@contextmanager
def serving(
    target: ServerSettings | Path | str, *, clock: FakeClock | None = None, **options: Any
) -> Iterator[LocalServer]:
    """Serve in a thread until the block ends, on free ports; the block begins when everything is loaded.

    Args:
        target: what ``ovms serve`` takes (a model, a folder of models, a configuration, a project), or settings.
        clock: clock of the server.
        options: fields of ``ServerSettings`` by name.

    Raises:
        ConfigError: the configuration is invalid, or something could not be loaded.
    """
    settings = _settings(target, options)
    started: SimpleQueue[LocalServer | BaseException] = SimpleQueue()
    ending: list[Callable[[], None]] = []

    async def main() -> None:
        token, ended = trio.lowlevel.current_trio_token(), trio.Event()
        ending.append(lambda: token.run_sync_soon(ended.set))

        def run_in_loop(function: Callable[..., Any], *values: Any) -> Any:
            return trio.from_thread.run_sync(function, *values, trio_token=token)

        plan = replace(await read_plan(settings), grpc=_ANY_PORT, rest=_ANY_PORT)
        async with _serving(plan, None) as running:
            urls = f"grpc://{running.grpc[0]}", f"http://{running.rest[0]}"
            started.put(LocalServer(*urls, run_in_loop, clock))
            await ended.wait()

    def run() -> None:
        try:
            trio.run(main, clock=clock)
        except BaseException as error:  # noqa: BLE001 - raised in the test, which waits for it
            started.put(error)

    with _quiet_logs():
        thread = threading.Thread(target=run, name="ovmstrio-testing")
        thread.start()
        try:
            server = started.get()
            if isinstance(server, BaseException):
                raise _single(server)
            yield server
        finally:
            for end in ending:
                with suppress(trio.RunFinishedError):
                    end()
            thread.join()


@asynccontextmanager
async def serving_async(
    target: ServerSettings | Path | str, *, clock: FakeClock | None = None, **options: Any
) -> AsyncIterator[LocalServer]:
    """Serve as ``serving`` does, for tests on trio or asyncio."""
    server = serving(target, clock=clock, **options)
    started = await anyio.to_thread.run_sync(server.__enter__)
    try:
        yield started
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.__exit__, None, None, None)


@dataclass(frozen=True, slots=True)
class MemoryServer:
    """Running server in the loop of its test."""

    _grpc: _MemoryListener = field(repr=False)
    _rest: _MemoryListener = field(repr=False)

    def async_client(self, *, rest: bool = False, **options: Any) -> AsyncClient:
        """Return a client; ``options`` are those of ``AsyncClient``."""
        url, listener = ("http://memory", self._rest) if rest else ("grpc://memory", self._grpc)
        return AsyncClient(url, connect=listener.connect, **options)


@asynccontextmanager
async def serving_in_memory(target: ServerSettings | Path | str, **options: Any) -> AsyncIterator[MemoryServer]:
    """Serve without sockets in the running trio loop until the block ends; arguments as those of ``serving``.

    Raises:
        ConfigError: as ``serving``.
        RuntimeError: no trio loop is running.
    """
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError("serving_in_memory requires a trio loop; tests on asyncio use serving_async")
    plan = replace(await read_plan(_settings(target, options)), grpc=_ANY_PORT, rest=_ANY_PORT)
    grpc, rest = _MemoryListener(), _MemoryListener()
    with _quiet_logs():
        async with _serving(plan, WorkerProcessContext(listeners={"gRPC": [grpc], "REST": [rest]})):
            yield MemoryServer(grpc, rest)


@asynccontextmanager
async def _serving(plan: Plan, context: WorkerProcessContext | None) -> AsyncIterator[Running]:
    async def serve(*, task_status: trio.TaskStatus[Running]) -> None:
        await serve_plan(plan, context, handle_signals=False, task_status=task_status)

    async with trio.open_nursery() as nursery:
        running = await nursery.start(serve)
        with trio.move_on_after(_READY_SECONDS) as loading:
            await running.wait_loaded()
        errors = [each for each in running.plane.registry.findings() if each.severity == "error"]
        if errors or loading.cancelled_caught:
            nursery.cancel_scope.cancel()
            if errors:
                raise ConfigError(errors)
            raise TimeoutError(f"not everything was loaded within {_READY_SECONDS:g} seconds")
        yield running
        nursery.cancel_scope.cancel()


def _settings(target: ServerSettings | Path | str, options: dict[str, Any]) -> ServerSettings:
    if isinstance(target, ServerSettings):
        return target.model_copy(update=options) if options else target
    return settings_of(target, **{"crash_probe": "off", **options})


def _single(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Log warnings to standard error, unless the program has configured structlog."""
    if structlog.is_configured():
        yield
        return
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.reset_defaults()


# -- Memory ------------------------------------------------------------------------------------------------------------


class _MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """Listener whose connections come from ``connect``."""

    def __init__(self) -> None:
        self._connections, self._accepted = trio.open_memory_channel[trio.abc.Stream](math.inf)

    async def accept(self) -> trio.abc.Stream:
        return await self._accepted.receive()

    async def aclose(self) -> None:
        self._accepted.close()
        self._connections.close()
        await trio.lowlevel.checkpoint()

    async def connect(self) -> _MemoryStream:
        """Return the client's side of a new connection."""
        ours, theirs = trio.testing.memory_stream_pair()
        await self._connections.send(theirs)
        return _MemoryStream(ours)


class _MemoryStream(anyio.abc.ByteStream):
    """Stream of anyio over one of trio."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self._stream = stream

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        with _translating():
            data = bytes(await self._stream.receive_some(max_bytes))
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        with _translating():
            await self._stream.send_all(item)

    async def send_eof(self) -> None:
        with _translating():
            await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except trio.BrokenResourceError as error:
        raise anyio.BrokenResourceError from error
    except trio.ClosedResourceError as error:
        raise anyio.ClosedResourceError from error
