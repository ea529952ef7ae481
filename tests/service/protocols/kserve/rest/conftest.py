"""A REST front end over a real registry and data plane, served on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.protocols.servers import Serving, serving_rest


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve the model ``echo`` in versions 1 and 2 (the default is 2), as long as the test lasts."""
    async with serving_rest(tmp_path) as server:
        yield server
