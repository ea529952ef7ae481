from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from cortex_internal.lib.client.python import ModelClient
from cortex_internal.lib.client.tensorflow import TensorFlowClient
from cortex_internal.lib.exceptions import CortexException, UserException, UserRuntimeException
from cortex_internal.lib.log import configure_logger, logger


class _Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


_ENDLESS: list[Any] = []
_ENDLESS.append(_ENDLESS)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_is_an_object_with_four_keys(capsys: pytest.CaptureFixture[str]) -> None:
    logger.info("read %d bytes", 7)
    (line,) = lines(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", line.pop("asctime"))
    assert line == {"levelname": "INFO", "message": "read 7 bytes", "process": os.getpid()}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"text": "é"}, {"text": "é"}),
        (object, "<class 'object'>"),
        ({1}, "{1}"),
        (_Unprintable(), "<_Unprintable that cannot be formatted: ValueError>"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (_ENDLESS, "[[...]]"),
    ],
    ids=["JSON", "class", "set", "unprintable", "keys", "cycle"],
)
def test_extras_are_json_or_text(value: Any, written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    logger.info("got", extra={"value": value, "other": "x", "labels": {"a": 1}})
    (line,) = lines(capsys)
    assert (line["value"], line["other"], line["message"]) == (written, "x", "got")
    assert "labels" not in line


def test_exceptions_have_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        int("boom")
    except ValueError:
        logger.exception("failed")
    (line,) = lines(capsys)
    assert line["levelname"] == "ERROR"
    assert line["exc_info"].startswith("Traceback")
    assert line["exc_info"].endswith("base 10: 'boom'")


@pytest.mark.parametrize(("level", "shown"), [("warning", ["warned"]), ("loud", ["informed", "warned"])])
def test_the_level_is_that_of_the_project(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, shown: list[str]
) -> None:
    monkeypatch.setenv("CORTEX_LOG_LEVEL", level)
    made = configure_logger(f"cortex_internal.tested.{level}", "/somewhere/log_config.yaml")
    assert configure_logger(f"cortex_internal.tested.{level}") is made
    made.debug("debugged")
    made.info("informed")
    made.warning("warned")
    assert [line["message"] for line in lines(capsys)] == shown


def test_texts_of_exceptions() -> None:
    assert str(CortexException("a", "b")) == "a: b"
    error: UserException = UserRuntimeException("model x", "not found")
    assert str(error) == "error: model x: not found: runtime exception"
    error = UserException("b")
    error.wrap("while loading", "a")
    assert str(error) == "while loading: a: error: b"
    assert issubclass(UserException, CortexException)


def test_clients_have_the_methods_that_handlers_call() -> None:
    assert ModelClient.__abstractmethods__ == {"get_model", "set_load_method", "metadata", "caching"}
    assert TensorFlowClient.__abstractmethods__ == {"predict"}
