"""Output of commands for names and errors with control characters, on a terminal and in a pipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from ovmstrio.core.texts import CONTROLS
from tests.support.commands import run_command, run_on_terminal
from tests.support.plain_http import QuietHandler, answering_http

NAME = "\x1b]0;t\x07\x9b2J\u202e[red]a\x7f[/red]\u2028"
SHOWN = "\\x1b]0;t\\x07\\x9b2J\\u202e[red]a\\x7f[/red]\\u2028"
"""The name as each command shows it."""


class _Hostile(QuietHandler):
    """A server whose names and errors are escape sequences."""

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        if self.path.startswith(("/v2/health", "/v2/models/bad")):
            self._answer(404, {"error": f"no {NAME}"})
        else:
            self._answer(200, {"name": NAME, "platform": NAME, "versions": ["1"], "inputs": [], "outputs": []})

    def do_POST(self) -> None:  # noqa: N802 - the library's name
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


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the address of a server with hostile names."""
    with answering_http(_Hostile) as url:
        yield url.removeprefix("http://")


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
    options = ("--url", address, *(() if arguments == ["health"] else ("--rest",)))
    written = run_on_terminal(*arguments, *options)[1]
    # Bold headings are rich's own.
    written = re.sub(r"\x1b\[[0-9;]*m|\r\n", "", written)
    assert CONTROLS.findall(written) == []
    assert "\\x1b" in written
    assert "[red]a\\x7f[/red]" in re.sub(r"\s+", "", written)


def test_a_table_in_a_pipe_has_the_names_of_a_server_escaped(address: str) -> None:
    """Pagers such as less -R obey escape sequences, too."""
    written = run_command("models", "--url", address, "--rest").stdout
    assert set(CONTROLS.findall(written)) == {"\n"}
    assert SHOWN in written
