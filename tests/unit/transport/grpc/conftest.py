from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """Collect what is logged; no peer may ever cause a failure of its connection's own code."""
    with capture_logs() as entries:
        yield entries
    assert [entry for entry in entries if entry["event"] == "connection failed"] == []
