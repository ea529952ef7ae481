"""The level of the log, which log files open further and several processes share."""

from __future__ import annotations

import logging

import pytest

from ovmstrio.observability.log_level import LogLevel


class _Cell:
    log_level = 0


@pytest.fixture
def handler() -> logging.Handler:
    """Give a handler that is there before any log file."""
    found = logging.Handler()
    logging.getLogger().addHandler(found)
    return found


def test_a_log_file_opens_the_level_for_itself_alone(handler: logging.Handler) -> None:
    """Handlers that were there get what is logged, also when that changes meanwhile, and nothing more."""
    level, root = LogLevel(), logging.getLogger()
    level.begin(logging.INFO, {})
    level.open_to(logging.DEBUG)
    assert (root.level, handler.level) == (logging.DEBUG, logging.INFO)
    level.set(logging.ERROR)
    assert (root.level, handler.level, level.value) == (logging.DEBUG, logging.ERROR, logging.ERROR)
    level.close_to(logging.DEBUG)
    assert (root.level, handler.level) == (logging.ERROR, logging.NOTSET)


def test_some_loggers_tell_no_more_than_they_did() -> None:
    """Those with a floor stay at it, those without have the level."""
    level = LogLevel()
    level.begin(logging.INFO, {"a talkative one": logging.WARNING, "one of its own": logging.NOTSET})
    for now, talkative, own in ((logging.DEBUG, logging.WARNING, logging.DEBUG), (logging.ERROR,) * 3):
        level.set(now)
        assert logging.getLogger("a talkative one").level == talkative
        assert logging.getLogger("one of its own").level == own


def test_processes_share_a_level() -> None:
    """One that is changed holds for the others, and for one that comes later; nobody changes what nobody changed."""
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
