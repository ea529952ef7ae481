"""What is logged is told and changed while serving, by Triton's own clients over both interfaces."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from tritonclient.utils import InferenceServerException

from ovmstrio.observability.log_level import LOG_LEVEL, LogLevel
from ovmstrio.observability.logs import configure_logs
from tests.support.both_doors import DOORS, BothDoors, serving_both


@pytest.fixture
async def serving() -> AsyncIterator[BothDoors]:
    """Serve nothing, which has a log all the same."""
    async with serving_both([]) as both:
        yield both


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Give the file that gets the log, from INFO on."""
    path = tmp_path / "server.log"
    configure_logs(level="INFO", fmt="json", path=path)
    return path


def _plain(told: Any) -> dict[str, Any]:
    """Give the settings that either client tells."""
    settings = told.get("settings", told)
    return {name: next(iter(one.values())) if isinstance(one, dict) else one for name, one in settings.items()}


async def _change(serving: BothDoors, door: str, settings: dict[str, Any]) -> dict[str, Any]:
    options = {"as_json": True} if door == "grpc" else {}
    return _plain(await serving.with_triton(door, lambda client, _: client.update_log_settings(settings, **options)))


async def _present(serving: BothDoors, door: str) -> dict[str, Any]:
    options = {"as_json": True} if door == "grpc" else {}
    return _plain(await serving.with_triton(door, lambda client, _: client.get_log_settings(**options)))


def _events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def _settings(path: Path, **levels: Any) -> dict[str, Any]:
    return {"log_file": str(path), "log_format": "ISO8601", "log_levels": "", **levels}


async def test_parts_of_the_log_have_levels_of_their_own(serving: BothDoors, log: Path) -> None:
    """By the names that users see; the rest stays as it is, and so does everything that is no level.

    Triton's client of gRPC can send no text.
    """
    door = "http"
    ours, others = (logging.getLogger(f"ovmstrio.runtimes.{name}.tested") for name in ("graphs", "ops"))
    try:
        told = await _change(serving, door, {"log_levels": "ovmstrio.graphs=debug"})
        assert told["log_levels"] == "ovmstrio.graphs=debug"
        ours.debug("of graphs")
        others.debug("of ops")
        with pytest.raises(InferenceServerException, match="expected one of TRACE"):
            await _change(serving, door, {"log_levels": "ovmstrio.graphs=loud"})
    finally:
        await _change(serving, door, {"log_levels": ""})
    ours.debug("of graphs again")

    assert [event for event in _events(log) if event.startswith("of ")] == ["of graphs"]


@pytest.mark.parametrize("door", DOORS)
async def test_the_settings_are_told(serving: BothDoors, door: str, log: Path) -> None:
    """A level stands for those above it, and the file is that of the log."""
    assert await _present(serving, door) == _settings(
        log, log_info=True, log_warning=True, log_error=True, log_verbose_level=0
    )


@pytest.mark.parametrize("door", DOORS)
async def test_levels_change_for_loggers_that_are_there(serving: BothDoors, door: str, log: Path) -> None:
    """Lines come and go as the settings say, of both kinds of loggers, and the answer is what holds then."""
    ours, theirs = structlog.get_logger("ours"), logging.getLogger("theirs")

    def tell(word: str) -> None:
        ours.debug(f"{word} ours")
        theirs.debug(f"{word} theirs")
        ours.error(f"{word} error")

    tell("first")
    told = await _change(serving, door, {"log_verbose_level": 2})
    assert (told["log_verbose_level"], told["log_info"]) == (1, True)
    tell("second")
    told = await _change(serving, door, {"log_info": False})
    assert [told[f"log_{level}"] for level in ("verbose_level", "info", "warning", "error")] == [0, False, True, True]
    tell("third")
    told = await _change(serving, door, {"log_error": False, "log_warning": False})
    assert told["log_error"] is False
    tell("fourth")

    wanted = {
        f"{word} {kind}" for word in ("first", "second", "third", "fourth") for kind in ("ours", "theirs", "error")
    }
    assert [event for event in _events(log) if event in wanted] == [
        "first error",
        "second ours",
        "second theirs",
        "second error",
        "third error",
    ]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"log_file": "/tmp/elsewhere.log"}, "--log_path chooses it at the start"),
        ({"log_format": "default"}, "--log_format chooses it at the start"),
        ({"log_warning": False, "log_info": True}, "log_warning cannot be off while log_info is on"),
        ({"log_infos": True}, "log_infos not known, expected some of log_file, log_info"),
        ({"log_info": None}, "log_info: expected true or false, got None"),
        ({"log_verbose_level": None}, "log_verbose_level: expected a whole number, 0 for none, got None"),
    ],
)
async def test_what_cannot_be_is_refused(
    serving: BothDoors, door: str, log: Path, settings: dict[str, Any], text: str
) -> None:
    """The refusal names the setting, and nothing has changed."""
    with pytest.raises(InferenceServerException, match=text):
        await _change(serving, door, {"log_error": True, **settings})
    assert await _present(serving, door) == _settings(
        log, log_info=True, log_warning=True, log_error=True, log_verbose_level=0
    )


@pytest.mark.usefixtures("log")
async def test_other_machines_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may ask over both doors, and change with remote administration alone."""
    monkeypatch.setattr("ovmstrio.api.admin.locality.is_local", lambda _: False)
    async with serving_both([]) as both:
        for door in DOORS:
            assert (await _present(both, door))["log_info"] is True
            with pytest.raises(InferenceServerException, match="--allow_remote_admin lets other machines do it"):
                await _change(both, door, {"log_info": False})
    assert LOG_LEVEL.value == logging.INFO
    async with serving_both([], allows_remote_admin=True) as both:
        for level, door in zip((False, True), DOORS, strict=True):
            assert (await _change(both, door, {"log_info": level}))["log_info"] is level


@pytest.mark.parametrize("door", DOORS)
async def test_the_log_of_a_program_is_its_own(serving: BothDoors, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in a program that has not given it its log changes nothing of it."""
    monkeypatch.setattr("ovmstrio.api.kserve.observation_settings.LOG_LEVEL", LogLevel())
    with pytest.raises(InferenceServerException, match="up to the program that the server runs in"):
        await _change(serving, door, {"log_info": False})
