"""Errors that nobody foresaw: each is logged whole, answered without its text, and ends nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from ovmstrio.core.errors import NotFound
from tests.unit.api.rest.servers import BODY, Serving, infer_post

INTERNAL = {"error": "internal error; the server's log has the details"}


def _raising(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


async def test_an_error_that_nobody_foresaw_is_logged_and_not_told(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client learns nothing of the inside, the log everything."""
    error = KeyError("a secret")
    monkeypatch.setattr(serving.plane, "model_metadata", _raising(error))
    with capture_logs() as logs:
        answer = await serving.get("/v2/models/echo")
    assert (answer.status_code, answer.json()) == (500, INTERNAL)
    (logged,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert logged["exc_info"] is error
    assert (await serving.get("/v2")).status_code == 200


async def test_of_several_errors_all_are_logged(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is one error's; the framework would drop the others silently."""
    group = ExceptionGroup("several", [NotFound("nobody is here"), KeyError("a secret")])
    monkeypatch.setattr(serving.plane, "model_metadata", _raising(group))
    with capture_logs() as logs:
        answer = await serving.get("/v2/models/echo")
    assert (answer.status_code, answer.json()) == (404, {"error": "nobody is here"})
    assert [entry["exc_info"] for entry in logs if entry["log_level"] == "error"] == [group]


@pytest.mark.parametrize("extra", [(), ("TE: trailers",)], ids=["lane", "application"])
async def test_a_servable_that_breaks_ends_one_request(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...]
) -> None:
    """Both ways through the server contain it, and the connection goes on."""
    async with serving.connect() as peer:
        with monkeypatch.context() as broken, capture_logs() as logs:
            broken.setattr(serving.plane, "infer", _raising(ZeroDivisionError("a secret")))
            answer = await peer.ask(infer_post(BODY, *extra))
        assert (answer.status, answer.json) == (500, INTERNAL)
        assert [(entry["event"], entry["model"]) for entry in logs if entry["log_level"] == "error"] == [
            ("request failed", "echo")
        ]
        assert (await peer.ask(infer_post(BODY, *extra))).status == 200
