"""Levels of the log and of its parts."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from ovmstrio.observability.log_level import LogLevel
from ovmstrio.observability.log_trees import LOG_TREES, loggers_of, read_log_levels, written_log_levels


class _Cell:
    log_level = 0


@pytest.fixture
def handler() -> logging.Handler:
    """Give a handler that is there before any log file."""
    found = logging.Handler()
    logging.getLogger().addHandler(found)
    return found


def test_a_log_file_lowers_the_level_only_for_itself(handler: logging.Handler) -> None:
    level, root = LogLevel(), logging.getLogger()
    level.begin(logging.INFO, {})
    level.open_to(logging.DEBUG)
    assert (root.level, handler.level) == (logging.DEBUG, logging.INFO)
    level.set(logging.ERROR)
    assert (root.level, handler.level, level.value) == (logging.DEBUG, logging.ERROR, logging.ERROR)
    level.close_to(logging.DEBUG)
    assert (root.level, handler.level) == (logging.ERROR, logging.NOTSET)


def test_loggers_with_a_floor_stay_at_it() -> None:
    level = LogLevel()
    level.begin(logging.INFO, {"a talkative one": logging.WARNING, "one of its own": logging.NOTSET})
    for now, talkative, own in ((logging.DEBUG, logging.WARNING, logging.DEBUG), (logging.ERROR,) * 3):
        level.set(now)
        assert logging.getLogger("a talkative one").level == talkative
        assert logging.getLogger("one of its own").level == own


def test_a_changed_level_holds_for_all_processes() -> None:
    cell, first, second, late = _Cell(), LogLevel(), LogLevel(), LogLevel()
    for each in (first, second, late):
        each.begin(logging.INFO, {})
    with first.shared(cell), second.shared(cell):
        assert second.value == logging.INFO
        first.set(logging.DEBUG)
        assert second.value == logging.DEBUG
        with late.shared(cell):
            assert late.value == logging.DEBUG
    first.set(logging.ERROR)
    assert second.value == logging.DEBUG


GRAPHS = "ovmstrio.runtimes.graphs.graph_instance"
REMOTE = "ovmstrio.runtimes.remote.health"


@pytest.fixture
def level() -> Iterator[LogLevel]:
    """A level of its own, after which everything is as it was."""
    root = logging.getLogger().level
    level = LogLevel()
    level.begin(logging.INFO, {})
    try:
        yield level
    finally:
        level.set_parts({})
        logging.getLogger().setLevel(root)


def test_levels_are_read_and_written() -> None:
    levels = read_log_levels(" ovmstrio.graphs=DEBUG, httpx = error ,")

    assert levels == {"ovmstrio.graphs": logging.DEBUG, "httpx": logging.ERROR}
    assert written_log_levels(levels) == "ovmstrio.graphs=debug,httpx=error"
    assert read_log_levels("") == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ovmstrio.graphs", "expected names and levels such as .*, got 'ovmstrio.graphs'"),
        ("=debug", "expected names and levels"),
        ("ovmstrio.graphs=loud", "ovmstrio.graphs: expected one of TRACE, DEBUG, .*, got 'loud'"),
        ("ovmstrio.grahps=debug", "nothing logs as 'ovmstrio.grahps'; below ovmstrio. are generation, graphs, "),
        ("ovmstrio.graphs.nowhere=debug", "nothing logs as 'ovmstrio.graphs.nowhere'"),
        (f"ovmstrio.{'x' * 5000}=debug", "nothing logs as 'ovmstrio.x"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_log_levels(text)


@pytest.mark.parametrize(
    "name", [*LOG_TREES, "ovmstrio", "ovmstrio.printed", "ovmstrio.access", "ovmstrio.http.router"]
)
def test_every_logger_of_the_server_can_have_a_level(name: str) -> None:
    assert read_log_levels(f"{name}=debug") == {name: logging.DEBUG}


def test_short_names_stand_for_packages() -> None:
    assert loggers_of("ovmstrio.graphs.policies") == "ovmstrio.runtimes.graphs.policies"
    assert loggers_of("ovmstrio.grpc") == "ovmstrio.wire.grpc"
    assert loggers_of("ovmstrio.graphsomething") == "ovmstrio.graphsomething"
    assert loggers_of("httpx") == "httpx"


def test_a_level_of_a_part_overrides_the_general_level(level: LogLevel) -> None:
    level.set_parts({"ovmstrio.graphs": logging.DEBUG})
    assert logging.getLogger(GRAPHS).isEnabledFor(logging.DEBUG)
    assert not logging.getLogger(REMOTE).isEnabledFor(logging.DEBUG)

    level.set(logging.ERROR)
    assert logging.getLogger(GRAPHS).isEnabledFor(logging.DEBUG)
    assert not logging.getLogger(REMOTE).isEnabledFor(logging.WARNING)

    level.set_parts({"ovmstrio.remote": logging.INFO})
    assert not logging.getLogger(GRAPHS).isEnabledFor(logging.WARNING)
    assert logging.getLogger(REMOTE).isEnabledFor(logging.INFO)
