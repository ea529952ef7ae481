"""Control characters in log lines: shown, never obeyed by a terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import TYPE_CHECKING, Literal

import pytest
import structlog

from ovmstrio.core.events import WireRequest
from ovmstrio.core.texts import CONTROLS
from ovmstrio.observability.access_log import AccessLog, AccessLogForm
from ovmstrio.observability.log_sinks import StandardSink
from ovmstrio.observability.log_writer import LogOutlet
from ovmstrio.observability.logs import configure_logs
from tests.support.peers import LOCAL

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = [
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b2J",
    "\x7f",
    "a\u202eb",
    "a\u2066b",
    "a\u2028b",
    "a\u2029b",
    "\r2026-01-01 forged",
    "a\n2026-01-01T00:00:00Z [error    ] forged",
    "tab\there",
    "\ud800",
]


class _Shown:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    __str__ = __repr__


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _fail(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("place", ["event", "value", "object", "nested", "key", "logger", "standard", "argument"])
def test_a_field_of_a_console_line_has_no_raw_control_characters(text: str, place: str, tmp_path: Path) -> None:
    """A record of any logger is one line without control characters, in each of its fields."""
    path = tmp_path / "server.log"
    configure_logs(path=path)
    ours = structlog.get_logger("ours")
    match place:
        case "event":
            ours.error(text)
        case "value":
            ours.error("model loaded", model=text)
        case "object":
            ours.error("model loaded", model=_Shown(text))
        case "nested":
            ours.error("model loaded", models=[{"name": _Shown(text)}])
        case "key":
            ours.error("model loaded", **{text: 1})
        case "logger":
            logging.getLogger(f"x{text}").error("loaded")
        case "standard":
            logging.getLogger("theirs").error(text)
        case _:
            logging.getLogger("theirs").error("loaded %s", text)
    written = path.read_bytes().decode("utf-8", "surrogatepass")
    assert written.endswith("\n")
    assert CONTROLS.sub("", written[:-1]) == written[:-1]


@pytest.mark.parametrize("fmt", ["pretty", "json"])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_traceback_has_no_raw_control_characters_but_its_line_breaks(
    text: str, fmt: Literal["pretty", "json"], tmp_path: Path
) -> None:
    """The text of an error may come from a client."""
    path = tmp_path / "server.log"
    configure_logs(fmt=fmt, path=path)
    try:
        _fail(text)
    except ValueError:
        structlog.get_logger("ours").exception("call failed", name=text)
        logging.getLogger("theirs").exception("failed")
    written = path.read_bytes().decode("utf-8", "surrogatepass")
    assert set(CONTROLS.findall(written)) == {"\n"}
    assert written.count("Traceback (most recent call last)" if fmt == "pretty" else '"exc_type": "ValueError"') == 2


def test_colours_of_the_console_stay_and_those_of_a_value_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets the escape sequences of the log, and none of a value's."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logs()
    structlog.get_logger("ours").error("\x1b[5mloaded", model="\x1b[5mname", path="\x1b]0;a title\x07")
    written = terminal.getvalue()
    assert "\x1b[" in written
    assert "\x1b[5m" not in written
    assert "\x1b]" not in written
    assert "\\x1b[5mloaded" in written
    assert "\\x1b[5mname" in written
    assert "'\\x1b]0;a title\\x07'" in written


@pytest.mark.parametrize("form", ["combined", "json"])
@pytest.mark.parametrize("text", HOSTILE)
def test_an_access_log_line_has_no_raw_control_characters(
    text: str, form: AccessLogForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that a client sends ends up escaped in its own field."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    request = WireRequest("HTTP", text, f"/v2/{text}", [("user-agent", text), ("referer", text)], LOCAL)
    request.status = 200
    AccessLog(form, LogOutlet(StandardSink("stdout"))).request_ended(request)
    written = out.getvalue()
    assert CONTROLS.sub("", written) == written.removesuffix("\n")
    if form == "json":
        assert json.loads(written)["user_agent"] == text
