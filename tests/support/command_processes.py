"""Commands of ``ovms`` in processes of their own, with pipes or on a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from tests.support.processes import environment

BOUND_SECONDS = 60


class PipedCommand:
    """A running command with pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.stdin: IO[str] = process.stdin
        self.stdout: IO[str] = process.stdout
        self.stderr: IO[str] = process.stderr
        self.process = process
        self._reader = threading.Thread(target=process.stdout.read)

    def discard_stdout(self) -> None:
        self._reader.start()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        if self._reader.ident is None:
            self.discard_stdout()
        code = self.process.wait(BOUND_SECONDS)
        self._reader.join()
        return code, self.stderr.read()


@contextmanager
def piped(*arguments: str) -> Iterator[PipedCommand]:
    """Run a command line with pipes until the end of the block."""
    command = [sys.executable, "-m", "ovms_cli", *arguments]
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
        ends = time.monotonic() + BOUND_SECONDS
        while self.shown.count(text) < times:
            ready = select.select([self._terminal], [], [], max(0.0, ends - time.monotonic()))[0]
            assert ready, self.shown
            self.shown += os.read(self._terminal, 65_536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        try:
            while read := os.read(self._terminal, 65_536):
                self.shown += read.decode(errors="replace")
        except OSError:
            pass  # Linux ends the output of a closed terminal with an error.
        return self.process.wait(BOUND_SECONDS)


@contextmanager
def on_terminal(*arguments: str) -> Iterator[CommandOnTerminal]:
    """Run a command line on a terminal of 100 columns until the end of the block."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ovms_cli", *arguments]
    variables = {**environment(), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            yield CommandOnTerminal(process, ours)
        finally:
            process.kill()
            os.close(ours)
