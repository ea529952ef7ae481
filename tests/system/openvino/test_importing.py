"""What the import of OpenVINO brings along."""

from __future__ import annotations

import subprocess
import sys

_LOOK = """
import sys, threading
import ovmstrio.openvino.runtime, ovmstrio.openvino.conversion
print(threading.active_count(), [name for name in sys.modules if name.startswith("openvino_telemetry.")])
"""


def test_nobody_is_told_and_no_thread_is_started() -> None:
    """OpenVINO's package reports its imports, which a server must not do for its operator."""
    found = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split(maxsplit=1) == ["1", "[]\n"]
