"""Servers in this process, on the loop of a test or in a thread for blocking clients."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import structlog
import trio

from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.server.plan import Plan, plan_project, read_plan
from ovmstrio.server.running import Running
from ovmstrio.server.server import serve_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.worker_context import WorkerProcessContext
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.telemetry.logs import configure_logs
from tests.support.isolation_checks import LogSettings


@dataclass(frozen=True, slots=True)
class ServedPlan:
    plane: DataPlane
    grpc: list[str]
    rest: list[str]
    metrics: list[str]
    drain: Callable[[], None]


@asynccontextmanager
async def serving_plan(plan: Plan, *, drains: bool = False) -> AsyncIterator[ServedPlan]:
    """Serve a plan until the block ends, which cancels the server or drains it, and then it must end gently."""
    draining = trio.Event()
    results: list[bool] = []

    async def serve(*, task_status: trio.TaskStatus[Running]) -> None:
        hosting = WorkerProcessContext(wait_drain=draining.wait)
        results.append(await serve_plan(plan, hosting, handle_signals=False, task_status=task_status))

    async with trio.open_nursery() as nursery:
        running = await nursery.start(serve)
        yield ServedPlan(running.plane, running.grpc, running.rest, running.metrics, draining.set)
        if drains:
            draining.set()
        else:
            nursery.cancel_scope.cancel()
    if drains:
        assert results == [True]


PATIENCE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class ServedInThread:
    grpc: str
    http: str

    @property
    def rest(self) -> str:
        return f"http://{self.http}"

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        with httpx.Client(timeout=PATIENCE_SECONDS, trust_env=False) as client:
            return client.request(method, self.rest + path, **options)


@contextmanager
def serving_in_thread(http: str = "127.0.0.1:0", /, **settings: Any) -> Iterator[ServedInThread]:
    """Serve on free ports of loopback, or at an address over HTTP, until the block ends; for ``settings`` see there."""
    loopback: dict[str, Any] = {"grpc_bind_address": "127.0.0.1", "rest_bind_address": "127.0.0.1"}
    given = ServerSettings(**{**loopback, "crash_probe": "off", **settings})

    async def plan() -> Plan:
        return replace(await read_plan(given), grpc=("127.0.0.1:0",), rest=(http,))

    with _logs_of_server(given), _serving(plan) as server:
        yield server


@contextmanager
def serving_project_in_thread(project: Path) -> Iterator[ServedInThread]:
    """Serve a project of one process on a free port of loopback until the block ends."""
    spec, _ = read_project(project)

    async def plan() -> Plan:
        made = plan_project(spec, {"crash_probe": "off"})
        return replace(made, grpc=made.grpc and ("127.0.0.1:0",), rest=made.rest and ("127.0.0.1:0",))

    with _logs_of_server(ServerSettings()), _serving(plan) as server:
        yield server


@contextmanager
def _logs_of_server(settings: ServerSettings) -> Iterator[None]:
    if structlog.is_configured():
        yield
        return
    before = LogSettings()
    configure_logs(level=settings.log_level, fmt=settings.log_format, path=settings.log_path)
    # A cached logger would keep the configuration after the server has ended.
    structlog.configure(cache_logger_on_first_use=False)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def _serving(make_plan: Callable[[], Awaitable[Plan]]) -> Iterator[ServedInThread]:
    started: SimpleQueue[ServedInThread | BaseException] = SimpleQueue()
    ending: list[Any] = []

    async def main() -> None:
        end = trio.Event()
        ending.extend((trio.lowlevel.current_trio_token(), end))
        plan = await make_plan()
        async with serving_plan(plan) as server:
            with trio.fail_after(PATIENCE_SECONDS):
                await server.plane.registry.wait_loaded()
            started.put(ServedInThread("".join(server.grpc[:1]), "".join(server.rest[:1])))
            await end.wait()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001 - raised in the test, which waits for it
            started.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        server = started.get(timeout=PATIENCE_SECONDS)
        if isinstance(server, BaseException):
            raise server
        yield server
    finally:
        if ending:
            token, end = ending
            token.run_sync_soon(end.set)
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
