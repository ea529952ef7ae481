from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_UNITS = Path(__file__).parents[3] / "deploy" / "systemd"


@pytest.mark.parametrize("unit", sorted(path.name for path in _UNITS.iterdir()))
def test_units_fit_the_server(unit: str) -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.read(_UNITS / unit)
    if unit.endswith(".socket"):
        assert parser["Socket"]["FileDescriptorName"] == unit.removeprefix("ovms-").removesuffix(".socket")
        assert parser["Socket"]["Service"] == "ovms.service"
    else:
        service = parser["Service"]
        assert (service["Type"], service["KillMode"]) == ("notify", "mixed")
        assert int(service["WatchdogSec"]) > 0
        # The last of several lines.
        assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here to check its units")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for path in _UNITS.iterdir():
        text = path.read_text().replace("/opt/ovms/bin/ovms", sys.executable)
        (tmp_path / path.name).write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, sorted(tmp_path.iterdir()))],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    assert "ovms" not in checked.stderr, checked.stderr
