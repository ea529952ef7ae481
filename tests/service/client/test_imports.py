from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "openvino", "trio", "anyio", "asyncio", "grpc", "httpx", "h2", "structlog", "rich", "pydantic", "google.protobuf"
)  # fmt: skip


def test_a_blocking_client_is_imported_without_the_server() -> None:
    program = f"import sys, ovmstrio.client; print([each for each in {list(HEAVY)} if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
