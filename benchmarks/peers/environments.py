"""Environments of other servers, created once in the user's cache folder from the package index."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

__all__ = ["python_of", "version_of"]

_WANTED: Final = {
    "kserve": "kserve>=0.17,<1",
    "mlserver": "mlserver>=1.7,<2",
    "litserve": "litserve>=0.2.17,<0.3",
    "bentoml": "bentoml>=1.4,<2",
    "xllamacpp": "xllamacpp>=2026.10,<2027",
}
_WITHOUT_OPENVINO: Final = {"xllamacpp"}
_INSTALL_SECONDS: Final = 1_800


def python_of(peer: str) -> Path:
    """Return the interpreter of a server's environment, and create the environment if necessary.

    Raises:
        subprocess.CalledProcessError: the installation failed.
    """
    folder = user_cache_path("ovmstrio") / "benchmarks" / "peers" / peer
    python, complete = folder / "bin" / "python", folder / "complete"
    # Equal versions of OpenVINO make the models comparable.
    packages = [_WANTED[peer], *([] if peer in _WITHOUT_OPENVINO else [f"openvino=={version('openvino')}"])]
    if not complete.exists() or complete.read_text() != " ".join(packages):
        print(f"installing {peer} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_SECONDS)
        install = [str(python), "-m", "pip", "install", "-q", *packages]
        subprocess.run(install, check=True, timeout=_INSTALL_SECONDS)
        complete.write_text(" ".join(packages))
    return python


def version_of(peer: str) -> str:
    """Return the installed version of a server."""
    command = [str(python_of(peer)), "-c", f"from importlib.metadata import version; print(version({peer!r}))"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
