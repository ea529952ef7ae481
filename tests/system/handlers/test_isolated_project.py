"""``ovms serve PROJECT --python_isolation process``."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.project_processes import serving_project
from tests.support.projects import write_project
from tests.support.waits import WAIT_SECONDS

CODE = """
import ctypes, os, time

class Handler:
    def handle_post(self, payload):
        if payload == "segfault":
            ctypes.string_at(0)
        return {"pid": os.getpid()}

    def handle_get(self):
        yield "one"
        while not os.path.exists("go"):
            time.sleep(0.005)
        ctypes.string_at(0)

    def handle_put(self):
        yield "one "
        yield "two"
"""


def test_a_crash_fails_its_own_call_alone(tmp_path: Path) -> None:
    """The caller gets the signal, a stream ends, and the next call is answered. The test stops its server."""
    with serving_project(write_project(tmp_path / "project", CODE), "--python_isolation", "process") as server:
        pid = server.ask("POST", json=1).json()["pid"]
        assert pid != server.process.pid
        answer = server.ask("POST", json="segfault")
        assert (answer.status_code, answer.text) == (500, "the process that ran this call was killed by SIGSEGV")
        with httpx.stream("GET", f"http://{server.address}/", timeout=WAIT_SECONDS, trust_env=False) as stream:
            pieces = stream.iter_raw()
            assert next(pieces) == b"one"
            (tmp_path / "project" / "go").touch()
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        assert server.ask("PUT").text == "one two"
        assert server.ask("POST", json=1).json()["pid"] not in {pid, server.process.pid}
        assert server.stop() == 0
    assert not Path(f"/proc/{pid}").exists()
