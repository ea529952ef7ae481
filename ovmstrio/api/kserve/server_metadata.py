"""What the server tells of itself to clients of KServe v2."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

__all__ = ["EXTENSIONS", "SERVER_NAME", "server_version"]

SERVER_NAME: Final = "OpenVINO Model Server"
"""The name that clients of OVMS see and some of them check."""
EXTENSIONS: Final = ("binary_tensor_data", "generate")
"""Those of KServe v2 that the server has."""


def server_version() -> str:
    """Give the version of this server."""
    return version("ovmstrio")
