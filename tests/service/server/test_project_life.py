"""The life of a server of one project, in one process."""

from __future__ import annotations

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

from ovmstrio.server.life import serve_plan
from ovmstrio.server.project_plan import plan_project
from ovmstrio.server.running import Running
from tests.support.projects import make_project

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
    protocol = "held"
    asked = threading.Event()
    go = threading.Event()

    def find(self, path: str, **options: Any) -> Any:
        self.asked.set()
        self.go.wait(PATIENCE_SECONDS)
        return super().find(path, **options)


@pytest.fixture
def held() -> Iterator[type[_HeldFileSystem]]:
    """Register the file system, anew for each test."""
    _HeldFileSystem.asked.clear()
    _HeldFileSystem.go.clear()
    fsspec.register_implementation("held", _HeldFileSystem, clobber=True)
    yield _HeldFileSystem
    _HeldFileSystem.go.set()


async def test_a_project_is_ready_after_its_models_and_its_constructor(
    tmp_path: Path, held: type[_HeldFileSystem]
) -> None:
    """Which finds the models; until then there is neither a file nor an address."""
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
        assert await trio.to_thread.run_sync(held.asked.wait, PATIENCE_SECONDS)
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
