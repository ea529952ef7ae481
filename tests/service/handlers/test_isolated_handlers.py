from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import httpx
import trio

from ovmstrio.server.life import serve
from ovmstrio.server.running import Running
from ovmstrio.server.settings import ServerSettings
from tests.support.projects import write_project
from tests.support.system_servers import PID_HANDLER
from tests.support.waits import WAIT_SECONDS


async def test_readiness_follows_the_process_of_a_handler(tmp_path: Path) -> None:
    write_project(tmp_path / "alone", PID_HANDLER)
    config, path = tmp_path / "config.json", tmp_path / "rest"
    entry = {"name": "alone", "path": "alone", "python_isolation": "process"}
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": [entry]}))
    settings = ServerSettings(config_path=config, port=0, rest_port=0, rest_bind_address=f"unix:{path}")
    async with trio.open_nursery() as nursery:
        with trio.fail_after(WAIT_SECONDS):
            running: Running = await nursery.start(partial(serve, settings, handle_signals=False))
            plane = running.plane
            await plane.registry.wait_loaded()
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://h", timeout=WAIT_SECONDS) as client:
                os.kill((await client.get("/alone")).json()["pid"], signal.SIGKILL)
            while plane.readiness().ready:
                await plane.wait_change()
            assert "its worker processes have ended" in plane.readiness().reason
            while not plane.readiness().ready:
                await plane.wait_change()
        nursery.cancel_scope.cancel()
