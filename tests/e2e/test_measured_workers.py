"""The end of a server while it measures how many workers it needs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from ovmstrio.work.cores import usable_cores
from tests.support.processes import serving

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(usable_cores() == 1, reason="nothing is measured where there is one core"),
]

SECONDS = 120
_T = TypeVar("_T")


def _soon(find: Callable[[], _T | None]) -> _T:
    """Look until something is found."""
    ends = time.monotonic() + SECONDS
    while (found := find()) is None:
        assert time.monotonic() < ends
        time.sleep(0.02)
    return found


def _writer_of(pipe: Path) -> int | None:
    """Open a pipe that somebody reads."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def _measuring(server: int) -> psutil.Process | None:
    """Find the process that measures."""
    children = psutil.Process(server).children()
    return next((each for each in children if any("measuring" in part for part in each.cmdline())), None)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_what_measures_ends_with_the_server(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Be it that it would go on for ever, as here, where it reads what nobody writes; and no traceback is printed."""
    config, log = tmp_path / "config.json", tmp_path / "log"
    os.mkfifo(config)
    models = [{"config": {"name": "m", "base_path": str(tmp_path / "m")}}]
    with serving("--config_path", str(config), "--workers", "auto", ready=False, log=log) as server:
        writer = _soon(lambda: _writer_of(config))
        os.write(writer, json.dumps({"model_config_list": models}).encode())
        os.close(writer)
        measuring = _soon(lambda: _measuring(server.process.pid))
        writer = _soon(lambda: _writer_of(config))
        try:
            status, printed = server.stop(number)
            assert (status, "Traceback" in printed) == (code, False)
            measuring.wait(SECONDS)
        finally:
            os.close(writer)
