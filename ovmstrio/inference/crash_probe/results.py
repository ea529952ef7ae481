"""What is remembered of trials, in a folder that servers share: files that are written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import structlog
from platformdirs import user_cache_path

from ovmstrio.inference.crash_probe.probe import Trial, Verdict
from ovmstrio.util.regular_files import open_regular, read_regular_text

__all__ = ["TrialMemory", "trials_folder"]

log = structlog.get_logger(__name__)

_PROCEDURE: Final = 1
"""Raised when trials see more than before, so that old verdicts do not count."""
_MOST_FILES: Final = 4_000
_FLAGS: Final = re.compile(r"^(?:flags|Features|model name)\s*:.*$", re.MULTILINE)


def trials_folder(cache: Path | None = None) -> Path:
    """Give where trials are remembered: in a folder for what is compiled, if there is one, or the user's for caches."""
    return (cache or user_cache_path("ovmstrio")) / "trials"


class TrialMemory:
    """Verdicts by what was tried; all that it does blocks for as long as the disk takes.

    Args:
        folder: where they are; without one, or where it cannot be written, they last as long as this object.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._here: dict[str, Verdict] = {}

    def key_of(self, trial: Trial) -> str:
        """Say what is tried: the content of the files, the settings, OpenVINO, the device, and the processor.

        Files whose paths, sizes, times and inodes are known are not read.

        Raises:
            OSError: a file cannot be read.
        """
        content = self._content_of(trial.path)
        facts = [_PROCEDURE, content, trial.compile, trial.settings, trial.device, _openvino(), _processor()]
        return _digest(json.dumps(facts, sort_keys=True, default=str))

    def recall(self, key: str) -> Verdict | None:
        """Give the verdict that is remembered, None if there is none."""
        if self._folder is None:
            return self._here.get(key)
        # Whoever removes the file wants another trial, of a server that runs as well.
        try:
            return Verdict(**json.loads(self._read("verdicts", key)))
        except (ValueError, TypeError):
            return None

    def remember(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict."""
        self._here[key] = verdict
        self._write("verdicts", key, json.dumps(asdict(verdict)))

    def forget(self, key: str) -> None:
        """Have something tried again."""
        self._here.pop(key, None)
        if (path := self.path_of(key)) is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def path_of(self, key: str) -> Path | None:
        """Say where a verdict is kept."""
        return None if self._folder is None else self._folder / "verdicts" / key

    def _content_of(self, path: Path) -> str:
        files = list(_files(path))
        mark = _digest(json.dumps(files))
        known = self._read("contents", mark)
        if known:
            return known
        content = hashlib.blake2b(digest_size=32)
        for name, size, _, _ in files:
            with open_regular(name) as opened:
                digest = hashlib.file_digest(opened, "blake2b")
            content.update(f"{Path(name).name} {size} {digest.hexdigest()}\n".encode(errors="surrogateescape"))
        self._write("contents", mark, content.hexdigest())
        return content.hexdigest()

    def _read(self, kind: str, name: str) -> str:
        if self._folder is None:
            return ""
        try:
            return read_regular_text(self._folder / kind / name)
        except (OSError, UnicodeDecodeError):
            return ""

    def _write(self, kind: str, name: str, text: str) -> None:
        if self._folder is None:
            return
        folder = self._folder / kind
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_old_ones(folder)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as made:
                made.write(text)
            Path(made.name).replace(folder / name)
        except OSError as error:
            self._folder = None
            log.warning("trials of models are remembered by this process only", folder=str(folder), reason=str(error))


def _files(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """List the files of a model with what tells that one has changed, sorted."""
    found = [path, *path.parent.glob(f"{escape(path.stem)}.*")] if path.is_file() else path.rglob("*")
    for file in sorted(set(found)):
        if file.is_file():
            stat = file.stat()
            yield str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino


def _remove_old_ones(folder: Path) -> None:
    with os.scandir(folder) as found:
        entries = list(found)
    if len(entries) >= _MOST_FILES:
        entries.sort(key=lambda entry: entry.stat().st_mtime_ns)
        for entry in entries[: _MOST_FILES // 2]:
            Path(entry).unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=20).hexdigest()


def _openvino() -> str:
    try:
        return version("openvino")
    except PackageNotFoundError:
        return ""


@cache
def _processor() -> Any:
    """Say what the processor is and can do, which decides on the code that OpenVINO runs."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    return sorted(set(_FLAGS.findall(told)))
