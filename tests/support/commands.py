"""Commands of ``ovms`` run in this process or in processes with pipes or a terminal."""

from __future__ import annotations

import fcntl
import gc
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import structlog
import typer

from ovmstrio.cli import console
from ovmstrio.cli.commands import Group
from ovmstrio.cli.main import command_line, main
from ovmstrio.telemetry.log_writer import WRITER
from tests.support.processes import environment
from tests.support.waits import WAIT_SECONDS


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_command(*arguments: str, stdin: str | bytes = "") -> CommandResult:
    """Run one ``ovms`` command line to its end; an exception that the command does not handle is raised."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    streams = [io.TextIOWrapper(io.BytesIO(content), "utf-8") for content in (given, b"", b"")]
    exit_code = _run(arguments, *streams)
    out, err = (stream.buffer.getvalue().decode() for stream in streams[1:])
    return CommandResult(exit_code, out, err)


def all_commands() -> dict[str, list[Any]]:
    """Return the parameters of every command that runs something, by the words that name the command."""
    found: dict[str, list[Any]] = {}

    def collect(command: Any, path: str) -> None:
        with typer.Context(command, info_name=path) as ctx:
            if isinstance(command, Group):
                for name in command.list_commands(ctx):
                    collect(command.get_command(ctx, name), f"{path} {name}".strip())
            else:
                found[path] = command.get_params(ctx)

    collect(typer.main.get_command(command_line()), "")
    return found


def run_on_terminal(*arguments: str, columns: int = 300) -> tuple[int, str]:
    """Run one command line on a separate terminal without colours; return the exit code and all output."""
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
        # Under `python -m pytest`, help would name that command.
        patch.setattr(sys.modules["__main__"], "__package__", None)
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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


class PipedCommand:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        streams: Any = (process.stdin, process.stdout, process.stderr)
        self.stdin, self.stdout, self.stderr = streams
        self.process = process
        self._reader = threading.Thread(target=self.stdout.read)

    def discard_stdout(self) -> None:
        self._reader.start()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        if self._reader.ident is None:
            self.discard_stdout()
        code = self.process.wait(WAIT_SECONDS)
        self._reader.join()
        return code, str(self.stderr.read())


@contextmanager
def piped(*arguments: str) -> Iterator[PipedCommand]:
    command = [sys.executable, "-m", "ovmstrio.cli", *arguments]
    pipe = subprocess.PIPE
    variables = {**environment(), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=variables) as process:
        try:
            yield PipedCommand(process)
        finally:
            process.kill()


class CommandOnTerminal:
    """A running command on a terminal; ``shown`` is all output so far."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self.shown = ""

    def wait_for(self, text: str, times: int = 1) -> None:
        ends = time.monotonic() + WAIT_SECONDS
        while self.shown.count(text) < times:
            ready = select.select([self._terminal], [], [], max(0.0, ends - time.monotonic()))[0]
            assert ready, self.shown
            self.shown += os.read(self._terminal, 65_536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C, which reaches all processes of the terminal's foreground group."""
        self.type("\x03")

    def end(self) -> int:
        try:
            while read := os.read(self._terminal, 65_536):
                self.shown += read.decode(errors="replace")
        except OSError:
            pass  # Linux ends the output of a closed terminal with an error.
        return self.process.wait(WAIT_SECONDS)


@contextmanager
def on_terminal(*arguments: str, variables: Mapping[str, str] = {}) -> Iterator[CommandOnTerminal]:
    """Run a command line on a terminal of 100 columns until the end of the block."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ovmstrio.cli", *arguments]
    environ = {**environment(), "TERM": "xterm", "COLUMNS": "100", "LINES": "30", **variables}
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environ,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - a system call only
    ) as process:
        os.close(theirs)
        try:
            yield CommandOnTerminal(process, ours)
        finally:
            process.kill()
            os.close(ours)
