"""``ovms serve --workers auto``: the server stops while it measures how many workers it needs."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from ovmstrio.work.cores import usable_cores
from tests.support import ir
from tests.support.processes import serving
from tests.support.system_servers import write_config
from tests.support.waits import WAIT_SECONDS, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(usable_cores() == 1, reason="nothing is measured where there is one core")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_the_measuring_process_ends_with_the_server(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The process ends while it computes for long, and prints no traceback. The test stops its server."""
    config = write_config(tmp_path, {"name": "m", "base_path": str(ir.save(ir.slow(1024, 2_000), tmp_path, "m"))})
    options = ("--config_path", str(config), "--workers", "auto")
    with serving(*options, ready=False, log=tmp_path / "log") as server:
        (measuring,) = until(lambda: server.descendants("measuring"))
        # The process has imported everything, and loads or computes from now on.
        until(lambda: any("openvino" in each.path for each in measuring.memory_maps()))
        status, printed = server.stop(number)
        assert (status, "Traceback" in printed) == (code, False)
        measuring.wait(WAIT_SECONDS)
