"""Servers of OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ovmstrio.telemetry.metrics import Metrics
from tests.service.protocols.openai.servers import serve_openai
from tests.unit.protocols.servers import Serving


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serve_openai(tmp_path, metrics=Metrics()) as server:
        yield server


@pytest.fixture
async def ovms_serving(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serve_openai(tmp_path, front_end={"openai_errors": "ovms"}) as server:
        yield server
