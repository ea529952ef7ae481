"""Handlers of a configuration in processes of their own: isolation, and readiness of the server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from ovmstrio.server.life import serve
from ovmstrio.server.running import Running
from ovmstrio.server.settings import ServerSettings
from tests.support.projects import write_project

_CODE = """
import os, re

class Handler:
    def handle_post(self, payload):
        if payload == "regex":
            re.match("(a+)+$", "a" * 64 + "b")
        return {"pid": os.getpid(), "parent": os.getppid()}

"""
_PATIENCE_SECONDS = 60


@asynccontextmanager
async def _serving(folder: Path, *entries: dict[str, Any]) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    """Serve handlers at a Unix socket, and connect a client."""
    for entry in entries:
        write_project(folder / entry["path"], _CODE)
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": entries}))
    socket = folder / "rest"
    settings = ServerSettings(config_path=config, port=0, rest_port=0, rest_bind_address=f"unix:{socket}")
    async with trio.open_nursery() as nursery:
        with trio.fail_after(_PATIENCE_SECONDS):
            running: Running = await nursery.start(partial(serve, settings, handle_signals=False))
            await running.plane.registry.wait_loaded()
            transport = httpx.AsyncHTTPTransport(uds=str(socket))
            async with httpx.AsyncClient(transport=transport, base_url="http://h", timeout=_PATIENCE_SECONDS) as client:
                yield running, client
        nursery.cancel_scope.cancel()


async def test_an_entry_may_have_a_process_of_its_own(tmp_path: Path) -> None:
    """One handler has a process, the other is in the server; a call that never ends stops no call of the other."""
    alone = {"name": "alone", "path": "alone", "python_isolation": "process", "python_timeout_seconds": 2}
    async with _serving(tmp_path, alone, {"name": "inside", "path": "inside"}) as (_, client):
        first = (await client.post("/alone", json=1)).json()
        assert first["parent"] == os.getpid()
        assert (await client.post("/inside", json=1)).json()["pid"] == os.getpid()
        async with trio.open_nursery() as others:
            others.start_soon(_expect_killed, client)
            for _ in range(5):
                assert (await client.post("/inside", json=1)).status_code == 200
        assert (await client.post("/alone", json=1)).json()["pid"] != first["pid"]


async def _expect_killed(client: httpx.AsyncClient) -> None:
    answer = await client.post("/alone", json="regex")
    assert answer.status_code == 500
    assert answer.text.startswith("the process that ran this call was killed")


async def test_readiness_changes_with_the_process_of_a_handler(tmp_path: Path) -> None:
    """Waiters for a change of readiness wake when the process ends, and when another one has started."""
    async with _serving(tmp_path, {"name": "alone", "path": "alone", "python_isolation": "process"}) as (
        running,
        client,
    ):
        plane = running.plane
        os.kill((await client.post("/alone", json=1)).json()["pid"], signal.SIGKILL)
        while plane.readiness().ready:
            await plane.wait_change()
        assert "its worker processes have ended" in plane.readiness().reason
        while not plane.readiness().ready:
            await plane.wait_change()
