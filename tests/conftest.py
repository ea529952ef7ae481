"""Options, order and fixtures of all tests."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import structlog
from httpx._transports import default as transports
from hypothesis import settings

from tests.support import isolation_checks
from tests.support.isolation_checks import _configured_logs_restored  # noqa: F401 - an autouse fixture
from tests.support.processes import SHARED_CACHE

# A property has no deadline, because it would fail on a busy machine.
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.register_profile("quick", deadline=None, max_examples=15)

_PROJECT: Final = Path(__file__).parents[1]
_CODE: Final = ("ovmstrio",)
_MOST_FILES_IN_ONE_PROCESS: Final = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs slow tests."""
    parser.addoption("--thorough", action="store_true", help="run slow tests too, and 100 examples of each property")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run a few files or single tests in this process: starting workers would take longer than the tests."""
    paths = [argument.partition("::")[0] for argument in config.args]
    are_files = all(path.endswith(".py") for path in paths)
    return 0 if are_files and len(set(paths)) <= _MOST_FILES_IN_ONE_PROCESS else None


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process and those that tests start.

    Interrupts arrive even where a shell starts pytest with interrupts ignored. Modules that a server imports in
    threads are imported, because a mock clock would not wait for them. The code of the project is compiled, which
    would cost each process that tests start a second where writing bytecode is off.
    """
    settings.load_profile("thorough" if config.getoption("--thorough") else "quick")
    if config.getoption("--thorough"):
        config.pluginmanager.register(isolation_checks, "isolation_checks")
    if not hasattr(config, "workerinput"):
        for folder in _CODE:
            compileall.compile_dir(_PROJECT / folder, quiet=2)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    vars(transports)["create_ssl_context"] = _create_ssl_context
    # The default formatter renders source and local variables of all frames, which can take half a second.
    structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback
    for late in ("ovmstrio.server.front_ends", "ovmstrio.transport.http.application"):
        import_module(late)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def _default_ssl_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _create_ssl_context(verify: bool | str | ssl.SSLContext = True, *cert: Any, **more: Any) -> ssl.SSLContext:  # noqa: FBT002 - signature of httpx
    """Read the certificates of authorities once, which takes longer than most tests that call with httpx."""
    return _default_ssl_context() if verify is True else httpx.create_ssl_context(verify, *cert, **more)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Store the bytecode of test modules, which take half of the collection to compile; not that of code in tests."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless the option is set; let workers begin with the files of most tests."""
    if hasattr(config, "workerinput"):
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (-sizes[item.path], item.path))
    if config.getoption("--thorough"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --thorough")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exclude what collection has made from garbage collection, which is 10 times faster then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _cache_of_processes() -> Iterator[None]:
    """Set the cache folder of processes that tests start to the folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        if "XDG_CACHE_HOME" not in os.environ:
            patch.setenv("XDG_CACHE_HOME", str(SHARED_CACHE))
        yield


@pytest.fixture(autouse=True, scope="session")
def _cache_of_this_process() -> Iterator[None]:
    """Store results of trials and compiled models in the cache folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("crash_probe", "blob_cache"):
            patch.setattr(f"ovmstrio.inference.{module}.user_cache_path", lambda _: SHARED_CACHE)
        yield


@pytest.fixture(autouse=True)
def _compiled_models_are_shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile equal models once per process, except in tests of how models are compiled."""
    module = sys.modules.get("ovmstrio.inference.compile")
    if module is not None and request.node.get_closest_marker("compiles") is None:
        from tests.support.model_cache import sharing_compiled_models

        shared = sharing_compiled_models(module._compile)  # noqa: SLF001 - below every way to load a model
        monkeypatch.setattr(module, "_compile", shared)
