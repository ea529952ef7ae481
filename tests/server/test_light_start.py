"""What a server that serves models alone does not import."""

from __future__ import annotations

import subprocess
import sys

_HEAVY = ("quart", "hypercorn", "PIL", "grpc", "openvino", "ovmstrio.runtimes.ops.executor", "pyovms")
_SHOW = f"""
import sys
import ovmstrio.server.own_process, ovmstrio.server.front_ends
print([name for name in {_HEAVY!r} if name in sys.modules])
"""


def test_what_no_service_needs_is_not_imported_before_something_is_served() -> None:
    """Frameworks, decoders of images, OpenVINO, grpcio and the runtimes of Ops and of nodes wait for who needs them."""
    done = subprocess.run([sys.executable, "-c", _SHOW], capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout.strip() == "[]", done.stdout
