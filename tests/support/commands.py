"""Commands of ``ovms`` run in this process: their output and exit code, without the start of an interpreter."""

from __future__ import annotations

import gc
import io
import os
import pty
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import structlog

from ovms_cli import console
from ovms_cli.main import main
from ovmstrio.observability.log_writer import WRITER


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and output of a command."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


RunCommand = Callable[..., CommandResult]


def run_command(*arguments: str, stdin: str | bytes = "") -> CommandResult:
    """Run one ``ovms`` command line to its end; an exception that the command does not handle is raised."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    streams = [io.TextIOWrapper(io.BytesIO(content), "utf-8") for content in (given, b"", b"")]
    exit_code = _run(arguments, *streams)
    out, err = (stream.buffer.getvalue().decode() for stream in streams[1:])
    return CommandResult(exit_code, out, err)


def run_on_terminal(*arguments: str, columns: int = 300) -> tuple[int, str]:
    """Run one command line on a terminal of its own, without colours; return the exit code and all output."""
    ours, theirs = pty.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(ours, 65_536):
                chunks.append(chunk)
        except OSError:
            pass  # Linux ends the output of a closed terminal with an error.

    reader = threading.Thread(target=read)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(columns), "LINES": "50"}.items():
            patch.setenv(name, value)
        with ExitStack() as stack:
            streams = [stack.enter_context(open(os.dup(theirs), mode)) for mode in ("r", "w", "w")]  # noqa: PTH123 - descriptors
            os.close(theirs)
            reader.start()
            exit_code = _run(arguments, *streams)
    reader.join()
    os.close(ours)
    return exit_code, b"".join(chunks).decode("utf-8", "surrogatepass")


def _run(arguments: tuple[str, ...], stdin: IO[str], stdout: IO[str], stderr: IO[str]) -> int:
    with pytest.MonkeyPatch.context() as patch, _logs_elsewhere(), _own_consoles(), _same_collector():
        # Lines of servers in this process go to standard error as it is when they are written.
        _wait_for_log_lines()
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(sys, "argv", ["ovms", *arguments])
        for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
            patch.setattr(sys, name, stream)
        try:
            main()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            _wait_for_log_lines()
            stdout.flush()
            stderr.flush()
    return 0


def _wait_for_log_lines() -> None:
    for _ in range(6000):
        if not WRITER._waiting:  # noqa: SLF001 - a count of lines that only tests need
            return
        threading.Event().wait(0.01)
    raise AssertionError("log lines are not written")


@contextmanager
def _logs_elsewhere() -> Iterator[None]:
    """Keep the log lines of servers in this process out of the output of a command.

    Tracebacks are plain, because a traceback with local variables takes seconds.
    """
    before: dict[str, Any] | None = structlog.get_config() if structlog.is_configured() else None
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[renderer], logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
    try:
        yield
    finally:
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)


@contextmanager
def _own_consoles() -> Iterator[None]:
    for cached in (console.stdout, console.stderr):
        cached.cache_clear()
    try:
        yield
    finally:
        for cached in (console.stdout, console.stderr):
            cached.cache_clear()


@contextmanager
def _same_collector() -> Iterator[None]:
    before = gc.get_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*before)


@pytest.fixture
def command_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the current one, and set the width of outputs to 200 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path
