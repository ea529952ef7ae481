from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys, threading
import ovmstrio.inference.runtime, ovmstrio.inference.conversion
print(threading.active_count(), [name for name in sys.modules if name.startswith("openvino_telemetry.")])
"""


def test_import_of_openvino_sends_no_telemetry_and_starts_no_thread() -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split(maxsplit=1) == ["1", "[]\n"]
