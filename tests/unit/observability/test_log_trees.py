"""Levels of parts of the log, by the names that users see."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from ovmstrio.observability.log_level import LogLevel
from ovmstrio.observability.log_trees import LOG_TREES, loggers_of, read_log_levels, written_log_levels

if TYPE_CHECKING:
    from collections.abc import Iterator

GRAPHS = "ovmstrio.runtimes.graphs.graph_instance"
REMOTE = "ovmstrio.runtimes.remote.health"


@pytest.fixture
def level() -> Iterator[LogLevel]:
    """A level of its own, after which everything is as it was."""
    root = logging.getLogger().level
    made = LogLevel()
    made.begin(logging.INFO, {})
    try:
        yield made
    finally:
        made.set_parts({})
        logging.getLogger().setLevel(root)


def test_levels_are_read_and_written() -> None:
    """Capitals and blanks do not matter."""
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
def test_what_cannot_be_read_is_told(text: str, reason: str) -> None:
    """With what was expected."""
    with pytest.raises(ValueError, match=reason):
        read_log_levels(text)


@pytest.mark.parametrize(
    "name", [*LOG_TREES, "ovmstrio", "ovmstrio.printed", "ovmstrio.access", "ovmstrio.http.router"]
)
def test_what_the_server_logs_as_may_have_a_level(name: str) -> None:
    """Parts, and what is in them."""
    assert read_log_levels(f"{name}=debug") == {name: logging.DEBUG}


def test_short_names_stand_for_what_lies_deeper() -> None:
    """All others for themselves."""
    assert loggers_of("ovmstrio.graphs.policies") == "ovmstrio.runtimes.graphs.policies"
    assert loggers_of("ovmstrio.grpc") == "ovmstrio.wire.grpc"
    assert loggers_of("ovmstrio.graphsomething") == "ovmstrio.graphsomething"
    assert loggers_of("httpx") == "httpx"


def test_a_part_has_a_level_of_its_own_until_it_has_another(level: LogLevel) -> None:
    """It does not follow the level of all; the others do."""
    level.set_parts({"ovmstrio.graphs": logging.DEBUG})
    assert logging.getLogger(GRAPHS).isEnabledFor(logging.DEBUG)
    assert not logging.getLogger(REMOTE).isEnabledFor(logging.DEBUG)

    level.set(logging.ERROR)
    assert logging.getLogger(GRAPHS).isEnabledFor(logging.DEBUG)
    assert not logging.getLogger(REMOTE).isEnabledFor(logging.WARNING)

    level.set_parts({"ovmstrio.remote": logging.INFO})
    assert not logging.getLogger(GRAPHS).isEnabledFor(logging.WARNING)
    assert logging.getLogger(REMOTE).isEnabledFor(logging.INFO)
