"""What all tests share: slow tests need a flag, interrupts arrive, and each leaves the logs as they were."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import structlog
from hypothesis import settings

from tests.support.processes import SHARED_CACHE

# A machine that is busy with something else must not fail a property.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_configure() -> None:
    """Let interrupts arrive, here and in the processes that tests start, where a shell's job has them ignored.

    What a server imports in threads when it first needs it is there: a clock that jumps would not wait for them.
    """
    for late in ("ovmstrio.server.front_ends", "ovmstrio.wire.http.application"):
        import_module(late)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that lets slow tests run."""
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless they were asked for."""
    if config.getoption("--run-slow"):
        return
    skip = pytest.mark.skip(reason="slow; --run-slow runs it")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _nothing_left_to_the_collector() -> Iterator[None]:
    """Have what a test left open fail that test, and not the one in which it happens to be collected."""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_memory_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trials of models remembered beside what commands of other tests do."""
    monkeypatch.setattr("ovmstrio.openvino.trials.memory.user_cache_path", lambda _: SHARED_CACHE)


@pytest.fixture(autouse=True)
def _logs_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no test that configures logs hide the lines of later ones: loggers are not kept, handlers are put back."""
    configure = structlog.configure

    def configure_for_now(**settings: Any) -> None:
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", configure_for_now)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
