"""What all tests share: slow tests need a flag, interrupts arrive, and each leaves the logs as they were."""

from __future__ import annotations

import compileall
import os
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx._transports import default as transports
from hypothesis import settings

from tests.support import isolation_checks
from tests.support.isolation_checks import _configured_logs_restored  # noqa: F401 - an autouse fixture
from tests.support.processes import SHARED_CACHE

# A machine that is busy with something else must not fail a property; many examples of one are for slow runs.
settings.register_profile("thorough", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=30)

PROJECT = Path(__file__).parents[1]
CODE = ("ovmstrio", "cli", "compat")
STARTING_SERVERS = ("cli", "clients", "console", "deploy", "samples", "system")
"""Folders whose tests mostly wait for processes: few tests, which take long."""


def pytest_configure(config: pytest.Config) -> None:
    """Let interrupts arrive, here and in the processes that tests start, where a shell's job has them ignored.

    What a server imports in threads when it first needs it is there: a clock that jumps would not wait for them.
    The hundreds of processes that tests start find the project's code compiled, though bytecode be switched off.
    """
    settings.load_profile("thorough" if config.getoption("--run-slow") else "quick")
    if config.getoption("--run-slow"):
        config.pluginmanager.register(isolation_checks, "isolation_checks")
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
