"""Output of commands for names and errors with control characters, on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ovmstrio.core.texts import CONTROLS
from tests.support.processes import environment

NAME = "\x1b]0;t\x07\x9b2J\u202e[red]a\x7f[/red]\u2028"
SHOWN = "\\x1b]0;t\\x07\\x9b2J\\u202e[red]a\\x7f[/red]\\u2028"
"""The name as each command shows it."""


class _Hostile(BaseHTTPRequestHandler):
    """A server whose names and errors are escape sequences."""

    def do_GET(self) -> None:
        if self.path.startswith(("/v2/health", "/v2/models/bad")):
            self._answer(404, {"error": f"no {NAME}"})
        else:
            self._answer(200, {"name": NAME, "platform": NAME, "versions": ["1"], "inputs": [], "outputs": []})

    def do_POST(self) -> None:
        if "index" in self.path:
            states = [{"name": NAME, "version": "1", "state": "UNAVAILABLE", "reason": NAME}]
            self._answer(200, [*states, {"name": "b", "version": NAME, "state": NAME, "reason": ""}])
        else:
            self._answer(400, {"error": NAME})

    def _answer(self, status: int, document: object) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the address of a server with hostile names."""
    with _served() as found:
        yield found


@contextmanager
def _served() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hostile)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _on_terminal(arguments: list[str]) -> str:
    """Run a command on a terminal of its own, without colours, and return what the terminal gets."""
    ours, theirs = pty.openpty()
    names = {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "300", "LINES": "50"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ovms_cli", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**environment(), **names},
    )  # fmt: skip
    os.close(theirs)
    chunks = []
    try:
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    except OSError:
        pass  # The last process has closed the terminal.
    finally:
        os.close(ours)
        process.wait(30)
    return b"".join(chunks).decode("utf-8", "surrogatepass")


COMMANDS = [
    ["models"],
    ["models", "--output", "csv"],
    ["models", "bad"],
    ["infer", "--model", "m", "--input", "x=1"],
    ["health"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_terminal_gets_names_and_errors_of_a_server_escaped(arguments: list[str], address: str) -> None:
    """Escape sequences, bidi overrides and markup are shown as text."""
    written = _on_terminal([*arguments, "--url", address, *([] if arguments == ["health"] else ["--rest"])])
    # Bold headings are rich's own.
    written = re.sub(r"\x1b\[[0-9;]*m|\r\n", "", written)
    assert CONTROLS.findall(written) == []
    assert "\\x1b" in written
    assert "[red]a\\x7f[/red]" in re.sub(r"\s+", "", written)


def test_a_table_in_a_pipe_has_the_names_of_a_server_escaped(address: str) -> None:
    """Pagers such as less -R obey escape sequences, too."""
    done = subprocess.run(
        [sys.executable, "-m", "ovms_cli", "models", "--url", address, "--rest"],
        check=True, capture_output=True, env=environment(), timeout=60,
    )  # fmt: skip
    written = done.stdout.decode()
    assert set(CONTROLS.findall(written)) == {"\n"}
    assert SHOWN in written
