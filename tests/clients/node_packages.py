"""Node's packages for the clients in ``node/``, in a folder of the user's cache that many runs share.

``python -m tests.clients.node_packages`` installs them; where they are not, tests of them are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import platformdirs

__all__ = ["NODE", "installed_version", "packages", "run_program"]

NODE: Final = Path(__file__).parent / "node"
_SECONDS: Final = 300
_FILES: Final = ("package.json", "package-lock.json", ".npmrc")


def packages() -> Path:
    """Return the folder of the packages, which may be missing; each set of versions has its own."""
    lock = (NODE / "package-lock.json").read_bytes()
    return Path(platformdirs.user_cache_dir("ovmstrio")) / "tests" / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"


def installed_version(package: str) -> str:
    """Return the version of a package, or an empty text if the package or Node is not installed."""
    manifest = packages() / "node_modules" / package / "package.json"
    if shutil.which("node") is None or not manifest.is_file():
        return ""
    version: str = json.loads(manifest.read_text())["version"]
    return version


def run_program(program: Path, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program with the packages in reach."""
    with TemporaryDirectory() as folder:
        # Node looks for packages in the folder of the program.
        Path(folder, "node_modules").symlink_to(packages() / "node_modules")
        copied = shutil.copy(program, folder)
        return subprocess.run(
            ["node", copied, *arguments],
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def main() -> None:
    """Install them, all at once or not at all."""
    home = packages()
    if (home / "node_modules").is_dir():
        return
    home.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=home.parent) as folder:
        for name in _FILES:
            shutil.copy(NODE / name, folder)
        subprocess.run(["npm", "ci", "--ignore-scripts"], cwd=folder, check=True, timeout=_SECONDS)
        made = Path(folder, "node_modules")
        home.mkdir(exist_ok=True)
        os.rename(made, home / "node_modules")  # noqa: PTH104 - a folder, within one file system


if __name__ == "__main__":
    main()
