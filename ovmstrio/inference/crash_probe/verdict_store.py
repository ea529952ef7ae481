"""Store of crash-probe verdicts, in a folder shared by servers; files are written atomically."""

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

from ovmstrio.inference.crash_probe.verdict import ProbeModel, Verdict
from ovmstrio.util.regular_files import open_regular, read_regular_text

log = structlog.get_logger(__name__)

_PROCEDURE: Final = 1  # increased when the probe checks more, to invalidate old verdicts
_MAX_FILES: Final = 4_000
_FLAGS: Final = re.compile(r"^(?:flags|Features|model name)\s*:.*$", re.MULTILINE)


def verdicts_folder(cache: Path | None = None) -> Path:
    """Return the folder of verdicts: in ``cache`` or the user's cache folder."""
    return (cache or user_cache_path("ovmstrio")) / "trials"


class VerdictStore:
    """Verdicts by model, settings and machine; kept in memory without a writable ``folder``. Blocks for disk access."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._in_memory: dict[str, Verdict] = {}

    def key_of(self, trial: ProbeModel) -> str:
        """Return a hash of the model's files, settings, OpenVINO version, device and processor.

        Files of known path, size, time and inode are not read.

        Raises:
            OSError: a file cannot be read.
        """
        content = self._content_of(trial.path)
        try:
            openvino = version("openvino")
        except PackageNotFoundError:
            openvino = ""
        facts = [_PROCEDURE, content, trial.compile, trial.settings, trial.device, openvino, _processor()]
        return _digest(json.dumps(facts, sort_keys=True, default=str))

    def recall(self, key: str) -> Verdict | None:
        """Return the stored verdict, or None."""
        if self._folder is None:
            return self._in_memory.get(key)
        # Read the file each time: removing it requests another probe, also from a running server.
        try:
            return Verdict(**json.loads(self._read("verdicts", key)))
        except (ValueError, TypeError):
            return None

    def remember(self, key: str, verdict: Verdict) -> None:
        """Store a verdict."""
        self._in_memory[key] = verdict
        self._write("verdicts", key, json.dumps(asdict(verdict)))

    def forget(self, key: str) -> None:
        """Remove a verdict."""
        self._in_memory.pop(key, None)
        if (path := self.path_of(key)) is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def path_of(self, key: str) -> Path | None:
        """Return the file of a verdict."""
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
            _remove_oldest(folder)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as made:
                made.write(text)
            Path(made.name).replace(folder / name)
        except OSError as error:
            self._folder = None
            log.warning("crash probe verdicts not stored", folder=str(folder), reason=str(error))


def _files(path: Path) -> Iterator[tuple[str, int, int, int]]:
    found = [path, *path.parent.glob(f"{escape(path.stem)}.*")] if path.is_file() else path.rglob("*")
    for file in sorted(set(found)):
        if file.is_file():
            stat = file.stat()
            yield str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino


def _remove_oldest(folder: Path) -> None:
    with os.scandir(folder) as found:
        entries = list(found)
    if len(entries) >= _MAX_FILES:
        entries.sort(key=lambda entry: entry.stat().st_mtime_ns)
        for entry in entries[: _MAX_FILES // 2]:
            Path(entry).unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=20).hexdigest()


@cache
def _processor() -> Any:
    """Return the processor model and flags, which select OpenVINO's code."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    return sorted(set(_FLAGS.findall(text)))
