"""A server whose log nobody reads answers calls and drains."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx

from tests.support import ir
from tests.support.processes import serving
from tests.support.waits import WAIT_SECONDS
from tests.support.worker_clients import ROW


def test_an_unread_log_stops_neither_calls_nor_the_drain(tmp_path: Path) -> None:
    """A pipe holds 64 KiB; later lines are kept for a while, and then dropped.

    The output of the server is a pipe that the test does not read, and the test stops the server: it is its own.
    """
    model = ("--model_name", "m", "--model_path", str(ir.save(ir.dummy(), tmp_path, "m")))
    with serving(*model, "--log_level", "DEBUG") as server:
        with httpx.Client(base_url=server.rest, timeout=WAIT_SECONDS) as client:
            for _ in range(1500):
                client.post("/v2/models/m/infer", json=ROW).raise_for_status()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=WAIT_SECONDS) == 0
