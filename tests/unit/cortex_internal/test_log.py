"""The logger that handlers import."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from cortex_internal.lib.log import configure_logger, logger


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Parse what was written to standard output."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_is_an_object_with_four_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Time with milliseconds, level, message and process."""
    logger.info("read %d bytes", 7)
    (line,) = lines(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", line.pop("asctime"))
    assert line == {"levelname": "INFO", "message": "read 7 bytes", "process": os.getpid()}


def test_extras_become_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the logger's own, of which labels is one."""
    logger.warning("got", extra={"payload": {"text": "é"}, "labels": {"a": 1}, "n": 3})
    (line,) = lines(capsys)
    assert (line["payload"], line["n"]) == ({"text": "é"}, 3)
    assert "labels" not in line


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (object, "<class 'object'>"),
        ({1}, "{1}"),
        (Unprintable(), "<Unprintable that cannot be written: ValueError>"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
    ],
)
def test_what_json_does_not_have_is_written_as_text(
    value: Any, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the line comes out whatever is in it."""
    logger.info("got", extra={"value": value, "other": "x"})
    (line,) = lines(capsys)
    assert (line["value"], line["other"], line["message"]) == (written, "x", "got")


def test_what_contains_itself_is_written_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A list that is its own element."""
    endless: list[Any] = []
    endless.append(endless)
    logger.info("got", extra={"value": endless})
    assert lines(capsys)[0]["value"] == "[[...]]"


def test_exceptions_bring_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """As one string, under exc_info."""
    try:
        int("boom")
    except ValueError:
        logger.exception("failed")
    (line,) = lines(capsys)
    assert line["levelname"] == "ERROR"
    assert line["exc_info"].startswith("Traceback")
    assert line["exc_info"].endswith("base 10: 'boom'")


def test_the_level_is_the_projects(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exported by the server; a logger is configured once however often it is asked for."""
    monkeypatch.setenv("CORTEX_LOG_LEVEL", "warning")
    made = configure_logger("cortex_internal.tested.level", "/somewhere/log_config.yaml")
    assert configure_logger("cortex_internal.tested.level") is made
    made.info("hidden")
    made.warning("shown")
    assert [line["message"] for line in lines(capsys)] == ["shown"]


def test_an_unknown_level_is_info(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As when there is none."""
    monkeypatch.setenv("CORTEX_LOG_LEVEL", "loud")
    made = configure_logger("cortex_internal.tested.other")
    made.debug("hidden")
    made.info("shown")
    assert [line["message"] for line in lines(capsys)] == ["shown"]
