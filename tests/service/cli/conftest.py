"""Server in this process for commands that call a server; separate, because it reconfigures logging."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.command_server import serving_for_commands
from tests.support.commands import command_folder
from tests.support.served_in_thread import ServedInThread

__all__ = ["command_folder", "server"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve models, graphs, a handler and a pipeline of Ops."""
    with serving_for_commands(tmp_path_factory.mktemp("commands")) as running:
        yield running
