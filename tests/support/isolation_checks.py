"""Autouse fixtures that check for leaks of a test: processes, garbage, loggers.

They cost too much for tests without processes. ``tests/system/conftest.py`` imports them for the tests of its folder,
and the option that runs slow tests registers this module as a plugin for all tests.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psutil
import pytest
import structlog

from tests.support.processes import is_resource_tracker, killed
from tests.support.waits import WAIT_SECONDS

RUN = ("OVMSTRIO_TESTS_RUN", uuid4().hex)
"""An environment variable that marks all processes that this process of tests starts."""
SHARED_PROCESSES: list[int] = []
"""Ids of servers that may outlive the tests of a file, as several files share them."""


@pytest.fixture(autouse=True, scope="session")
def _processes_know_their_run() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*RUN)
        yield


@pytest.fixture(autouse=True, scope="module")
def _no_process_left_running() -> Iterator[None]:
    before = _processes()
    yield
    left = psutil.wait_procs(_processes() - before, timeout=WAIT_SECONDS)[1]
    found = [killed(process) for process in set(left) & _processes() if not _has_ended(process)]
    assert not found, f"still running after the last test of this file: {found}"


def _processes() -> set[psutil.Process]:
    """Return the descendants of this process, also those whose parent has ended.

    The resource tracker of multiprocessing, the shared servers and their descendants are left out.
    """
    found = {*psutil.Process().children(recursive=True), *filter(_is_of_this_run, psutil.process_iter())}
    own = {each for each in found if each.pid not in SHARED_PROCESSES and not _descends_from_shared(each)}
    return {each for each in own if not is_resource_tracker(each)}


def _descends_from_shared(process: psutil.Process) -> bool:
    try:
        return any(parent.pid in SHARED_PROCESSES for parent in process.parents())
    except psutil.Error:
        return False


def _is_of_this_run(process: psutil.Process) -> bool:
    try:
        return process.environ().get(RUN[0]) == RUN[1]
    except psutil.Error:
        return False


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def _nothing_left_to_the_collector() -> Iterator[None]:
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


class LogSettings:
    def __init__(self) -> None:
        self._structlog = structlog.get_config() if structlog.is_configured() else None
        self._before = {logger: _settings(logger) for logger in _loggers()}

    def restore(self) -> None:
        """Restore the settings.

        Loggers that came with a library keep the ``NullHandler`` that the library added when it was imported.
        """
        for logger in _loggers():
            now, before = _settings(logger), self._before.get(logger, _NEW_LOGGER)
            if now == before:
                continue
            kept = [each for each in now[0] if each in before[0] or isinstance(each, logging.NullHandler)]
            for handler in now[0]:
                if handler not in kept:
                    handler.close()
            logger.handlers[:] = [*before[0], *(each for each in kept if each not in before[0])]
            logger.filters[:] = before[1]
            logger.propagate, logger.disabled = before[2], before[3]
            logger.setLevel(before[4])
        if self._structlog is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**self._structlog)


_NEW_LOGGER = ((), (), True, False, logging.NOTSET)


def _loggers() -> list[logging.Logger]:
    root = logging.getLogger()
    return [root, *(each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger))]


def _settings(logger: logging.Logger) -> tuple[tuple[Any, ...], tuple[Any, ...], bool, bool, int]:
    return tuple(logger.handlers), tuple(logger.filters), logger.propagate, logger.disabled, logger.level


@pytest.fixture(autouse=True)
def _loggers_restored() -> Iterator[None]:
    before = LogSettings()
    yield
    before.restore()


@pytest.fixture(autouse=True)
def _configured_logs_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore all loggers after a test that configures logs, which would hide the lines of later tests."""
    before: list[LogSettings] = []

    def noting(configure: Callable[..., None], **fixed: Any) -> Callable[..., None]:
        def configure_for_now(*arguments: Any, **settings: Any) -> None:
            if not before:
                before.append(LogSettings())
            configure(*arguments, **{**settings, **fixed})

        return configure_for_now

    monkeypatch.setattr(logging, "basicConfig", noting(logging.basicConfig))
    for name in ("addHandler", "setLevel"):
        monkeypatch.setattr(logging.Logger, name, noting(getattr(logging.Logger, name)))
    monkeypatch.setattr(structlog, "configure", noting(structlog.configure, cache_logger_on_first_use=False))
    yield
    for each in before:
        each.restore()
