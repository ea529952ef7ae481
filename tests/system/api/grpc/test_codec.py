"""Imports of the gRPC server."""

from __future__ import annotations

import subprocess
import sys


def test_the_server_does_not_import_grpcio() -> None:
    """The front end stands on grpclib's types and a transport of its own."""
    code = "import sys, ovmstrio.server.grpc_front_end; sys.exit('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
