"""What all tests share: slow tests need a flag, interrupts arrive, and each leaves the logs as they were."""

from __future__ import annotations

import compileall
import gc
import logging
import os
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
import structlog
from httpx._transports import default as transports
from hypothesis import settings

from tests.support.processes import SHARED_CACHE
from tests.support.whole_ends import killed

# A machine that is busy with something else must not fail a property; many examples of one are for slow runs.
settings.register_profile("thorough", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=30)

PROJECT = Path(__file__).parents[1]
CODE = ("ovmstrio", "cli", "compat")
STARTING_SERVERS = ("attacks", "chaos", "cli", "clients", "console", "deploy", "fuzz", "samples", "system")
"""Folders whose tests mostly wait for processes: few tests, which take long."""

SECONDS_FOR_PROCESSES_TO_END = 10
RUN = ("OVMSTRIO_TESTS_RUN", uuid4().hex)
"""A variable that tells what one process of tests has started from what others have."""


def pytest_configure(config: pytest.Config) -> None:
    """Let interrupts arrive, here and in the processes that tests start, where a shell's job has them ignored.

    What a server imports in threads when it first needs it is there: a clock that jumps would not wait for them.
    The hundreds of processes that tests start find the project's code compiled, though bytecode be switched off.
    """
    settings.load_profile("thorough" if config.getoption("--run-slow") else "quick")
    if not hasattr(config, "workerinput"):
        for folder in CODE:
            compileall.compile_dir(PROJECT / folder, quiet=2)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    vars(transports)["create_ssl_context"] = _trusting
    for late in ("ovmstrio.server.front_ends", "ovmstrio.wire.http.application"):
        import_module(late)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def _usual_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _trusting(verify: bool | str | ssl.SSLContext = True, *cert: Any, **more: Any) -> ssl.SSLContext:  # noqa: FBT002 - as httpx has it
    """Read the certificates of the world's authorities once, which takes longer than most tests that call by httpx."""
    return _usual_context() if verify is True else httpx.create_ssl_context(verify, *cert, **more)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that lets slow tests run."""
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow, too")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the bytecode of test modules, which take half of the collection to compile; not that of code in tests."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless they were asked for; share files out so that no worker ends with the longest one."""
    if hasattr(config, "workerinput"):
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (_folder(item) not in STARTING_SERVERS, -sizes[item.path], item.path))
    if config.getoption("--run-slow"):
        return
    skip = pytest.mark.skip(reason="slow; --run-slow runs it")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(PROJECT / "tests").parts[0] if item.path.is_relative_to(PROJECT / "tests") else ""


@pytest.fixture(autouse=True, scope="module")
def _no_process_left_running() -> Iterator[None]:
    """Have a process that outlives the tests of its file fail that file, and not another that counts processes."""
    before = _processes()
    yield
    left = psutil.wait_procs(_processes() - before, timeout=SECONDS_FOR_PROCESSES_TO_END)[1]
    told = [killed(process) for process in left if not _has_ended(process)]
    assert not told, f"still running after the last test of this file: {told}"


def _processes() -> set[psutil.Process]:
    """Give what this process has started and what that started, but for the process of Python's shared memory.

    Also what has outlived whoever had started it.
    """
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found = {*psutil.Process().children(recursive=True), *filter(_is_of_this_run, psutil.process_iter())}
    return {each for each in found if each.pid != tracker}


def _is_of_this_run(process: psutil.Process) -> bool:
    try:
        return process.environ().get(RUN[0]) == RUN[1]
    except psutil.Error:
        return False


def _has_ended(process: psutil.Process) -> bool:
    """Tell whether a process has ended, also one that nobody has taken out of the table yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True, scope="session")
def _processes_know_their_run() -> Iterator[None]:
    """Have the environment of whatever is started here say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*RUN)
        yield


@pytest.fixture(autouse=True)
def _nothing_left_to_the_collector() -> Iterator[None]:
    """Have what a test left open fail that test, and not the one in which it happens to be collected."""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _no_processes_with_the_users_own() -> Iterator[None]:
    """Have processes that tests start, workers of servers among them, keep what they keep in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        if "XDG_CACHE_HOME" not in os.environ:
            patch.setenv("XDG_CACHE_HOME", str(SHARED_CACHE))
        yield


@pytest.fixture(autouse=True)
def _no_memory_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trials of models remembered beside what commands of other tests do."""
    for module in ("trials.memory", "compiled_files"):
        monkeypatch.setattr(f"ovmstrio.openvino.{module}.user_cache_path", lambda _: SHARED_CACHE)


@pytest.fixture(autouse=True)
def _logs_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no test that configures logs hide the lines of later ones: each logger gets back what it had.

    Loggers that came with a library keep what it gave them when it was imported, if that is no place to write to.
    """
    configure = structlog.configure

    def configure_for_now(**settings: Any) -> None:
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", configure_for_now)
    before = {logger: _set_of(logger) for logger in _loggers()}
    yield
    for logger in _loggers():
        now, then = _set_of(logger), before.get(logger, _NEW_LOGGER)
        if now == then:
            continue
        kept = [each for each in now[0] if each in then[0] or isinstance(each, logging.NullHandler)]
        for handler in now[0]:
            if handler not in kept:
                handler.close()
        logger.handlers[:] = [*then[0], *(each for each in kept if each not in then[0])]
        logger.filters[:] = then[1]
        logger.propagate, logger.disabled = then[2], then[3]
        logger.setLevel(then[4])
    structlog.reset_defaults()


_NEW_LOGGER = ((), (), True, False, logging.NOTSET)


def _loggers() -> list[logging.Logger]:
    root = logging.getLogger()
    return [root, *(each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger))]


def _set_of(logger: logging.Logger) -> tuple[tuple[Any, ...], tuple[Any, ...], bool, bool, int]:
    """Give all that can be set of a logger."""
    return tuple(logger.handlers), tuple(logger.filters), logger.propagate, logger.disabled, logger.level
