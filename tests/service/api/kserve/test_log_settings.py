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
    async with serving_both([]) as both:
        yield both


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    configure_logs(level="INFO", fmt="json", path=path)
    return path


async def _settings_of(serving: BothDoors, door: str, method: str, *arguments: Any) -> dict[str, Any]:
    options = {"as_json": True} if door == "grpc" else {}
    found = await serving.with_triton(door, lambda client, _: getattr(client, method)(*arguments, **options))
    settings = found.get("settings", found)
    return {name: next(iter(one.values())) if isinstance(one, dict) else one for name, one in settings.items()}


async def _change(serving: BothDoors, door: str, settings: dict[str, Any]) -> dict[str, Any]:
    return await _settings_of(serving, door, "update_log_settings", settings)


async def _present(serving: BothDoors, door: str) -> dict[str, Any]:
    return await _settings_of(serving, door, "get_log_settings")


def _events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def _defaults(path: Path) -> dict[str, Any]:
    levels = {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0}
    return {"log_file": str(path), "log_format": "ISO8601", "log_levels": "", **levels}


async def test_log_levels_of_parts_are_set_by_logger_name(serving: BothDoors, log: Path) -> None:
    door = "http"  # The gRPC client of Triton can send no text.
    ours, others = (logging.getLogger(f"ovmstrio.runtimes.{name}.tested") for name in ("graphs", "ops"))
    try:
        changed = await _change(serving, door, {"log_levels": "ovmstrio.graphs=debug"})
        assert changed["log_levels"] == "ovmstrio.graphs=debug"
        ours.debug("of graphs")
        others.debug("of ops")
        with pytest.raises(InferenceServerException, match="expected one of TRACE"):
            await _change(serving, door, {"log_levels": "ovmstrio.graphs=loud"})
    finally:
        await _change(serving, door, {"log_levels": ""})
    ours.debug("of graphs again")
    assert [event for event in _events(log) if event.startswith("of ")] == ["of graphs"]


@pytest.mark.parametrize("door", DOORS)
async def test_log_levels_are_reported_and_change_for_existing_loggers(
    serving: BothDoors, door: str, log: Path
) -> None:
    ours, theirs = structlog.get_logger("ours"), logging.getLogger("theirs")

    def write(word: str) -> None:
        ours.debug(f"{word} ours")
        theirs.debug(f"{word} theirs")
        ours.error(f"{word} error")

    assert await _present(serving, door) == _defaults(log)
    write("first")
    changed = await _change(serving, door, {"log_verbose_level": 2})
    assert (changed["log_verbose_level"], changed["log_info"]) == (1, True)
    write("second")
    changed = await _change(serving, door, {"log_info": False})
    assert [changed[f"log_{level}"] for level in ("verbose_level", "info", "warning", "error")] == [
        0,
        False,
        True,
        True,
    ]
    write("third")
    changed = await _change(serving, door, {"log_error": False, "log_warning": False})
    assert changed["log_error"] is False
    write("fourth")

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
async def test_invalid_log_settings_are_refused_by_name_and_change_nothing(
    serving: BothDoors, door: str, log: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text):
        await _change(serving, door, {"log_error": True, **settings})
    assert await _present(serving, door) == _defaults(log)


@pytest.mark.usefixtures("log")
async def test_other_machines_change_log_settings_only_with_remote_administration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
async def test_the_log_of_an_embedding_program_is_not_changed(
    serving: BothDoors, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.api.kserve.observation_settings.LOG_LEVEL", LogLevel())
    with pytest.raises(InferenceServerException, match="up to the program that the server runs in"):
        await _change(serving, door, {"log_info": False})
