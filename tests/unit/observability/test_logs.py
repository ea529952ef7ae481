"""Logs as they are written."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import structlog

from ovmstrio.api.doors import KSERVE_GRPC
from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.events import OK, CallEvent
from ovmstrio.observability.logs import configure_logs
from ovmstrio.observability.request_log import RequestLog


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _fail() -> None:
    raise ModelFailure("the device is gone")


def test_json_logs_are_one_object_a_line_whoever_logs(tmp_path: Path) -> None:
    """Our events and those of libraries come out of the same pipeline."""
    path = tmp_path / "server.log"
    configure_logs(fmt="json", path=path)
    structlog.get_logger("ours").info("model available", model="m")
    logging.getLogger("theirs").warning("%s happened", "something")
    ours, theirs = _lines(path)
    assert (ours["event"], ours["model"], ours["level"], ours["logger"]) == ("model available", "m", "info", "ours")
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("something happened", "warning", "theirs")


def test_what_is_below_the_level_is_not_written(tmp_path: Path) -> None:
    """The level holds for both kinds of loggers."""
    path = tmp_path / "server.log"
    configure_logs(level="ERROR", fmt="json", path=path)
    structlog.get_logger("ours").warning("quiet")
    logging.getLogger("theirs").warning("quiet")
    assert _lines(path) == []


def test_a_failure_of_the_server_is_logged_with_its_traceback_and_a_refusal_is_not(tmp_path: Path) -> None:
    """Callers' mistakes are debug lines; what the operator must see is an error with its place in the code."""
    path = tmp_path / "server.log"
    configure_logs(fmt="json", path=path)
    log = RequestLog()

    def ended(code: str, error: Exception | None) -> None:
        event = CallEvent("m", "1", "model", KSERVE_GRPC, "ModelInfer", "42", code=code, error=error)
        log.call_finished(event)

    ended(OK, None)
    ended("InvalidRequest", InvalidRequest("shape"))
    with pytest.raises(ModelFailure) as raised:
        _fail()
    ended("ModelFailure", raised.value)
    (line,) = _lines(path)
    assert line["level"] == "error"
    assert (line["model"], line["request_id"], line["code"]) == ("m", "42", "ModelFailure")
    assert "the device is gone" in json.dumps(line["exception"])
    assert __file__ in json.dumps(line["exception"])


def test_a_log_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    """The caller can say so before anything starts."""
    with pytest.raises(OSError, match="No such file or directory"):
        configure_logs(path=tmp_path / "nowhere" / "server.log")
