"""The end of a server while it measures how many workers it needs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from ovmstrio.work.cores import usable_cores
from tests.support import ir
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


def _measuring(server: int) -> psutil.Process | None:
    """Find the process that measures."""
    children = psutil.Process(server).children()
    return next((each for each in children if any("measuring" in part for part in each.cmdline())), None)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_what_measures_ends_with_the_server(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Also while it computes for long, as here; and no traceback is printed."""
    config, log = tmp_path / "config.json", tmp_path / "log"
    base = ir.save(ir.slow(1024, 2_000), tmp_path, "m")
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "m", "base_path": str(base)}}]}))
    with serving("--config_path", str(config), "--workers", "auto", ready=False, log=log) as server:
        measuring = _soon(lambda: _measuring(server.process.pid))
        # It has imported everything, and loads or computes from now on.
        _soon(lambda: any("openvino" in each.path for each in measuring.memory_maps()) or None)
        status, printed = server.stop(number)
        assert (status, "Traceback" in printed) == (code, False)
        measuring.wait(SECONDS)
