"""Servers whose handlers run in processes of their own, as users start and call them."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ovmstrio.server.life import serve
from ovmstrio.server.running import Running
from ovmstrio.server.settings import ServerSettings
from tests.support.project_processes import serving_project
from tests.support.projects import write_project

_CODE = """
import ctypes, os, re, time

class Handler:
    def handle_post(self, payload):
        if payload == "segfault":
            ctypes.string_at(0)
        if payload == "regex":
            re.match("(a+)+$", "a" * 64 + "b")
        return {"pid": os.getpid(), "parent": os.getppid()}

    def handle_get(self):
        yield "one"
        while not os.path.exists("go"):
            time.sleep(0.005)
        ctypes.string_at(0)

    def handle_put(self):
        yield "one "
        yield "two"
"""
_PATIENCE_SECONDS = 60


async def test_an_entry_asks_for_a_process(tmp_path: Path) -> None:
    """One handler has its own, the other is in the server; a call that holds its process for ever stops nobody else."""
    for name in ("alone", "inside"):
        write_project(tmp_path / name, _CODE)
    entries: list[dict[str, Any]] = [{"name": name, "path": name} for name in ("alone", "inside")]
    entries[0] |= {"python_isolation": "process", "python_timeout_seconds": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": entries}))
    socket = tmp_path / "rest"
    settings = ServerSettings(config_path=config, port=0, rest_port=0, rest_bind_address=f"unix:{socket}")
    async with trio.open_nursery() as nursery:
        with trio.fail_after(_PATIENCE_SECONDS):
            running: Running = await nursery.start(partial(serve, settings, handle_signals=False))
            await running.plane.registry.wait_loaded()
            transport = httpx.AsyncHTTPTransport(uds=str(socket))
            async with httpx.AsyncClient(transport=transport, base_url="http://h", timeout=_PATIENCE_SECONDS) as client:
                told = (await client.post("/alone", json=1)).json()
                assert told["parent"] == os.getpid()
                assert (await client.post("/inside", json=1)).json()["pid"] == os.getpid()
                async with trio.open_nursery() as others:
                    others.start_soon(_expect_killed, client)
                    for _ in range(5):
                        assert (await client.post("/inside", json=1)).status_code == 200
                assert (await client.post("/alone", json=1)).json()["pid"] != told["pid"]
        nursery.cancel_scope.cancel()


async def test_who_waits_for_readiness_is_told_of_a_process_that_ends(tmp_path: Path) -> None:
    """At its end, and when there is another one: nothing else changes that would wake them."""
    write_project(tmp_path / "alone", _CODE)
    config = tmp_path / "config.json"
    entry = {"name": "alone", "path": "alone", "python_isolation": "process"}
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": [entry]}))
    socket = tmp_path / "rest"
    settings = ServerSettings(config_path=config, port=0, rest_port=0, rest_bind_address=f"unix:{socket}")
    async with trio.open_nursery() as nursery:
        with trio.fail_after(_PATIENCE_SECONDS):
            running: Running = await nursery.start(partial(serve, settings, handle_signals=False))
            plane = running.plane
            await plane.registry.wait_loaded()
            transport = httpx.AsyncHTTPTransport(uds=str(socket))
            async with httpx.AsyncClient(transport=transport, base_url="http://h", timeout=_PATIENCE_SECONDS) as client:
                os.kill((await client.post("/alone", json=1)).json()["pid"], signal.SIGKILL)
            while plane.readiness().ready:
                await plane.wait_change()
            assert "its worker processes have ended" in plane.readiness().reason
            while not plane.readiness().ready:
                await plane.wait_change()
        nursery.cancel_scope.cancel()


async def _expect_killed(client: httpx.AsyncClient) -> None:
    answer = await client.post("/alone", json="regex")
    assert answer.status_code == 500
    assert answer.text.startswith("the process that ran this call was killed")


def test_a_project_is_served_in_a_process(tmp_path: Path) -> None:
    """With one option: what it does to its process is told to its own caller, and the next call is answered."""
    with serving_project(write_project(tmp_path / "project", _CODE), "--python_isolation", "process") as server:
        pid = server.ask("POST", json=1).json()["pid"]
        assert pid != server.process.pid
        answer = server.ask("POST", json="segfault")
        assert (answer.status_code, answer.text) == (500, "the process that ran this call was killed by SIGSEGV")
        with httpx.stream("GET", f"http://{server.address}/", timeout=_PATIENCE_SECONDS, trust_env=False) as stream:
            pieces = stream.iter_raw()
            assert next(pieces) == b"one"
            (tmp_path / "project" / "go").touch()
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        assert server.ask("PUT").text == "one two"
        assert server.ask("POST", json=1).json()["pid"] not in {pid, server.process.pid}
        assert server.stop() == 0
    assert not Path(f"/proc/{pid}").exists()
