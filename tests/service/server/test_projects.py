from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
import trio
import trio.testing
from fsspec.implementations.local import LocalFileSystem

from ovmstrio.server.listeners import open_server_listeners
from ovmstrio.server.plan import own_port, plan_project
from ovmstrio.server.running import Running
from ovmstrio.server.server import serve_plan
from ovmstrio.transport.listeners import bound_address
from tests.support.projects import make_project


async def test_addresses_of_the_command_line_replace_the_port_of_the_file(tmp_path: Path) -> None:
    project = make_project(tmp_path, "", serve_port=1)
    usual = plan_project(project, {})
    assert own_port(project, usual.settings) == 1
    assert usual.rest == ("0.0.0.0:1",)
    plan = plan_project(project, {"port": 0, "rest_bind_address": f"127.0.0.1, unix:{tmp_path / 'socket'}"})
    async with open_server_listeners(plan.rest, None, plan.port_options) as listeners:
        first, second = map(bound_address, listeners)
        assert first.startswith("127.0.0.1:")
        assert not first.endswith(":0")
        assert second == f"unix:{tmp_path / 'socket'}"


async def test_port_in_use_is_named_with_the_option(tmp_path: Path) -> None:
    project = make_project(tmp_path, "")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        plan = plan_project(project, {"port": port, "rest_bind_address": "127.0.0.1"})
        with pytest.raises(OSError, match="in use") as caught:
            async with open_server_listeners(plan.rest, None, plan.port_options):
                raise AssertionError
    assert caught.value.errno == errno.EADDRINUSE
    address, hint = caught.value.__notes__
    assert f"127.0.0.1:{port}" in address
    assert "--port" in hint


async def test_unknown_host_is_named(tmp_path: Path) -> None:
    plan = plan_project(make_project(tmp_path, ""), {"port": 0, "rest_bind_address": "no-such-host.invalid"})
    with pytest.raises(socket.gaierror) as caught:
        async with open_server_listeners(plan.rest, None, plan.port_options):
            raise AssertionError
    assert caught.value.__notes__ == ["cannot listen at no-such-host.invalid:0"]


# Readiness


PATIENCE_SECONDS = 60
CODE = """
class Handler:
    def __init__(self, model_client):
        self.model = model_client.get_model("iris")

    def load_model(self, model_path):
        return model_path.rsplit("/", 2)[1:]

    def handle_get(self):
        return self.model
"""


class _HeldFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Local files whose listing waits for an event."""

    protocol = "held"
    requested = threading.Event()
    go = threading.Event()

    def find(self, path: str, **options: Any) -> Any:
        self.requested.set()
        self.go.wait(PATIENCE_SECONDS)
        return super().find(path, **options)


@pytest.fixture
def held() -> Iterator[type[_HeldFileSystem]]:
    _HeldFileSystem.requested.clear()
    _HeldFileSystem.go.clear()
    fsspec.register_implementation("held", _HeldFileSystem, clobber=True)
    yield _HeldFileSystem
    _HeldFileSystem.go.set()


async def test_project_is_ready_once_its_models_and_constructor_are(
    tmp_path: Path, held: type[_HeldFileSystem]
) -> None:
    version = tmp_path / "models" / "iris" / "3"
    version.mkdir(parents=True)
    (version / "model.pkl").touch()
    places = [{"name": "iris", "path": f"held://{version.parent}"}]
    project = make_project(tmp_path / "project", CODE, multi_model_reloading={"paths": places})
    file = tmp_path / "ready"
    plan = plan_project(project, {"port": 0, "rest_bind_address": "127.0.0.1", "readiness_file": file})
    started: list[Running] = []

    async def start() -> None:
        started.append(await nursery.start(partial(serve_plan, plan, handle_signals=False)))
        running.set()

    running = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start)
        assert await trio.to_thread.run_sync(held.requested.wait, PATIENCE_SECONDS)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert (file.exists(), started) == (False, [])
        held.go.set()
        with trio.fail_after(PATIENCE_SECONDS):
            await running.wait()
        assert file.exists()
        async with httpx.AsyncClient(base_url=f"http://{started[0].rest[0]}", trust_env=False) as client:
            assert (await client.get("/")).json() == ["iris", "3"]
            assert (await client.get("/info")).json()["model_metadata"]["iris"]["versions"] == ["3"]
        nursery.cancel_scope.cancel()
    assert not file.exists()
