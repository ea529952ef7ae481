"""Runner of the commands that a documentation page prints, in one network namespace with the printed ports.

A page is run from top to bottom like this:

- A fenced block with ``title="FILE"`` is written to that file.
- ``console`` blocks hold commands after ``$ ``, which one shell runs in order, and the output that follows each.
  ``...`` stands for any text, alone on a line for any number of lines. A command without output may print anything.
  It must succeed, unless the output below it ends with a line ``# exit code N``.
- The command of a ``console`` block with ``title="Server"`` stays running, on a terminal of 80 columns, until the next
  such block or the end of the page. The next block runs when the expected output has appeared.

``python -m tests.support.page_commands PAGE FOLDER`` runs one page and prints what differs.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.waits import WAIT_SECONDS

_FENCE: Final = re.compile(r"^```(\w+)(?: +title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXIT_CODE: Final = re.compile(r"# exit code (\d+)")
_ESCAPES: Final = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_][0-?]*[ -/]*[@-~]")
_SERVER: Final = "Server"
_COMMAND_SECONDS: Final = 10 * WAIT_SECONDS
"""Bound of one command, such as a download."""
_COLUMNS, _ROWS = 80, 50


class PageError(Exception):
    """A command that did not do what its page prints."""


@dataclass(slots=True)
class Command:
    """A command with its expected output and exit code."""

    text: str
    output: list[str] = field(default_factory=list)
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: a file's content, or commands."""

    language: str
    title: str
    text: str

    def commands(self) -> list[Command]:
        """Return the commands of a console block.

        Raises:
            PageError: the block begins with output.
        """
        found: list[Command] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append(Command(line[2:]))
            elif line.startswith("> ") and found and not found[-1].output:
                found[-1].text += "\n" + line[2:]
            elif not found:
                raise PageError(f"expected a command after '$ ', got {line!r}")
            elif exits := _EXIT_CODE.fullmatch(line):
                found[-1].exit_code = int(exits[1])
            else:
                found[-1].output.append(line)
        return found


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(*(part or "" for part in found)) for found in _FENCE.findall(page.read_text())]


def matches(expected: list[str], printed: str) -> bool:
    """Return whether an output is as expected; spaces at line ends and around the whole do not count."""
    lines = [re.escape(line.rstrip()).replace(r"\.\.\.", ".*") for line in expected]
    pattern = "".join(r"(?:.*\n)*?" if line == ".*" else rf"{line}\n" for line in lines)
    return re.fullmatch(pattern, _plain(printed).strip() + "\n") is not None


def _plain(printed: str) -> str:
    return "\n".join(line.rstrip() for line in _ESCAPES.sub("", printed).replace("\r\n", "\n").split("\n"))


class Shell:
    """A shell whose state lasts from command to command."""

    def __init__(self, folder: Path) -> None:
        command = ["bash", "--norc", "--noprofile"]
        self._process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, command: Command) -> None:
        """Run a command.

        Raises:
            PageError: the output or the exit code is not as expected.
        """
        end = f"== {time.monotonic_ns()} =="
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command.text}\nprintf '\\n{end} %s\\n' $?\n".encode())
        self._process.stdin.flush()
        printed, code = self._read_to(end)
        if code != command.exit_code or (command.output and not matches(command.output, printed)):
            expected = "\n".join(command.output)
            message = f"$ {command.text}\nexpected, exit code {command.exit_code}:\n{expected}\n"
            raise PageError(f"{message}got, exit code {code}:\n{_plain(printed)}")

    def _read_to(self, end: str) -> tuple[str, int]:
        assert self._process.stdout is not None
        found, until = b"", time.monotonic() + _COMMAND_SECONDS
        while not (ended := re.search(rf"\n{end} (\d+)\n".encode(), found)):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 65_536) if ready else b""
            if not piece:
                raise PageError(f"the command does not end; so far it printed:\n{found.decode()}")
            found += piece
        return found[: ended.start()].decode(), int(ended[1])

    def close(self) -> None:
        """End the shell."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_SECONDS)


class Server:
    """A command that runs on a terminal until it is interrupted."""

    def __init__(self, command: Command, folder: Path) -> None:
        self._command = command
        self._terminal, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (_ROWS, _COLUMNS))
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {command.text}"],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._printed = b""

    def wait_for_output(self) -> None:
        """Wait until the expected output has appeared.

        Raises:
            PageError: the command has ended, or the output does not appear.
        """
        until = time.monotonic() + _COMMAND_SECONDS
        while not matches(["...", *self._command.output, "..."], self._printed.decode(errors="replace")):
            if not self._read(max(0.0, until - time.monotonic())):
                printed, expected = _plain(self._printed.decode(errors="replace")), "\n".join(self._command.output)
                raise PageError(f"$ {self._command.text}\nexpected:\n{expected}\ngot:\n{printed}")

    def _read(self, seconds: float) -> bool:
        """Read more output; False at the end or after the time."""
        ready, _, _ = select.select([self._terminal], [], [], seconds)
        with suppress(OSError):
            piece = os.read(self._terminal, 65_536) if ready else b""
            self._printed += piece
            return bool(piece)
        return False

    def interrupt(self) -> None:
        """Press Ctrl-C, and wait for the end.

        Raises:
            PageError: the exit code is not 0.
        """
        os.write(self._terminal, b"\x03")
        until = time.monotonic() + WAIT_SECONDS
        while self._read(max(0.0, until - time.monotonic())):
            pass
        try:
            code = self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        os.close(self._terminal)
        if code:
            printed = _plain(self._printed.decode(errors="replace"))
            raise PageError(f"$ {self._command.text}\nexit code {code} after Ctrl-C, having printed:\n{printed}")


def run_page(page: Path, folder: Path) -> None:
    """Run all blocks of a page in a folder.

    Raises:
        PageError: a command did not do what the page prints.
    """
    shell, server = Shell(folder), None
    try:
        for block in blocks(page):
            if block.language == "console":
                if block.title != _SERVER:
                    for command in block.commands():
                        shell.run(command)
                    continue
                if server is not None:
                    server.interrupt()
                (command,) = block.commands()
                server = Server(command, folder)
                server.wait_for_output()
            elif block.title:
                (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.title).write_text(block.text)
    finally:
        shell.close()
        if server is not None:
            server.interrupt()


def has_network_namespaces() -> bool:
    """Return whether this user may create a network namespace."""
    unshare = shutil.which("unshare")
    return (
        unshare is not None
        and not subprocess.run([unshare, "-rn", "true"], check=False, capture_output=True).returncode
    )


def _main() -> None:
    page, folder = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        run_page(page, folder)
    except PageError as error:
        sys.exit(f"{page}: {error}")


if __name__ == "__main__":
    _main()
