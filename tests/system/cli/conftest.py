"""One in-process server for all commands that call a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_server import serving_for_commands
from tests.support.served_in_thread import ServedInThread


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServedInThread]:
    """Serve models, graphs, a handler and a pipeline of Ops."""
    with serving_for_commands(folder) as running:
        yield running
