"""``ProcessInfo.json``: serving processes and their ports, so that another command can stop them.

The file is a list of ``{"pid", "port", "model", "start_time"}``.  A pid may be reused, so a process is signalled only
if its start time matches the file.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.util.regular_files import open_regular, read_regular_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FILE_NAME: Final = "ProcessInfo.json"
MODEL: Final = "pipline"
"""Model name of a pipeline in the file, with the spelling of Paddle Serving."""

_SLACK_SECONDS: Final = 2.0
_STARTED_FIELD: Final = 18
"""Index of the start time among the fields of ``/proc/<pid>/stat`` after the state."""


@dataclass(frozen=True, slots=True)
class ServingProcess:
    """Process in the file; ``began`` is its start and ``start_time`` that of serving, in seconds since the epoch."""

    pid: int
    port: list[int | None] = field(default_factory=list)
    model: str = MODEL
    start_time: float = 0.0
    began: float | None = None

    @property
    def is_ours(self) -> bool:
        """True if the pid still belongs to the process that wrote the entry."""
        began = _began(self.pid)
        if began is None:
            return False
        if self.began is not None:
            return abs(began - self.began) < _SLACK_SECONDS
        return began <= self.start_time + _SLACK_SECONDS


def serving_home() -> Path:
    """Return the folder of the file: ``$SERVING_HOME``, or the current directory."""
    return Path(os.environ.get("SERVING_HOME") or Path.cwd())


@contextmanager
def record_process(ports: Sequence[int | None], folder: Path | None = None) -> Iterator[Path]:
    """Keep this process in the file within the block; removes stale entries and those with its ports; OSError."""
    directory = serving_home() if folder is None else folder
    directory.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    entry = ServingProcess(pid, list(ports), MODEL, time.time(), _began(pid))
    wanted = {port for port in ports if port}
    with _locked(directory) as entries:
        entries[:] = [each for each in entries if each.is_ours and not wanted & set(each.port)] + [entry]
    try:
        yield directory / FILE_NAME
    finally:
        with _locked(directory) as entries:
            entries[:] = [each for each in entries if each != entry]


def list_processes(folder: Path | None = None) -> list[ServingProcess]:
    """Return the entries of the file; empty if the file is missing or invalid."""
    path = (serving_home() if folder is None else folder) / FILE_NAME
    return _read(read_regular_text(path)) if path.exists() else []


def signal_processes(
    number: signal.Signals, port: int | None = None, folder: Path | None = None
) -> tuple[list[ServingProcess], list[ServingProcess]]:
    """Signal every process of the file, or the one with a port; return signalled and stale entries."""
    sent: list[ServingProcess] = []
    stale: list[ServingProcess] = []
    for process in list_processes(folder):
        if port is not None and port not in process.port:
            continue
        (sent if _send(process, number) else stale).append(process)
    return sent, stale


def wait_for_exit(process: ServingProcess, seconds: float) -> bool:
    """Wait for a process to end and return whether it did within the time; blocking."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return not process.is_ours or bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _send(process: ServingProcess, number: signal.Signals) -> bool:
    if not process.is_ours:
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _locked(directory: Path) -> Iterator[list[ServingProcess]]:
    with TextIOWrapper(open_regular(directory / FILE_NAME, os.O_RDWR | os.O_CREAT), encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        entries = _read(file.read())
        yield entries
        file.seek(0)
        file.truncate()
        json.dump([asdict(entry) for entry in entries], file)


def _read(text: str) -> list[ServingProcess]:
    try:
        entries: Any = json.loads(text) if text.strip() else []
    except ValueError:
        return []
    usable = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("pid"), int)]
    return [
        ServingProcess(
            entry["pid"],
            list(entry.get("port") or []),
            str(entry.get("model", "")),
            float(entry.get("start_time") or 0),
            entry.get("began"),
        )
        for entry in usable
    ]


def _began(pid: int) -> float | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except OSError:
        return None
    # The command name in parentheses may contain any character.
    state, *fields = stat.rpartition(")")[2].split()
    if state == "Z":
        return None
    ticks = int(fields[_STARTED_FIELD])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
