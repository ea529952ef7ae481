"""Imports of paddle_serving_server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_importing_leaves_no_files(tmp_path: Path) -> None:
    """A client that imports the package has no folder for logs afterwards."""
    command = [sys.executable, "-c", "import paddle_serving_server.pipeline"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, timeout=60)
    assert list(tmp_path.iterdir()) == []
