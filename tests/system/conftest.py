"""Shared servers, leak checks, and one rerun for tests of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.isolation_checks import (  # noqa: F401 - fixtures of all tests here
    _loggers_restored,
    _no_process_left_running,
    _nothing_left_to_the_collector,
    _processes_know_their_run,
)
from tests.support.system_servers import SystemServers

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each system test to run a second time if it fails: a busy machine may delay its processes."""
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the tests that ran a second time, with the end of the first failure."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.write_line(f"RERUN {report.nodeid}\n{report.longreprtext[-1500:]}")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemServers]:
    """Shared servers, which are started when a test needs one."""
    made = SystemServers(tmp_path_factory.mktemp("servers"))
    yield made
    made.close()
