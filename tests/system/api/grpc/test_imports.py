from __future__ import annotations

import subprocess
import sys


def test_the_front_end_imports_neither_grpcio_nor_handlers() -> None:
    code = "import sys, ovmstrio.server.grpc_front_end; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    imported = done.stdout.split()
    assert "ovmstrio.api.kserve.grpc.inference_service" in imported
    assert "grpc" not in imported
    assert not [name for name in imported if name.startswith("ovmstrio.") and "handlers" in name]
