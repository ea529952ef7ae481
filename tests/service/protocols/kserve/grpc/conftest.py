from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.telemetry.metrics import Metrics
from tests.service.protocols.kserve.grpc.servers import Serving, serving_grpc
from tests.support.stub_registry import load_pass_through


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve the model ``echo`` in versions 1 and 2, of which 2 is the default."""
    base = tmp_path / "echo"
    for version in ("1", "2"):
        (base / version).mkdir(parents=True)
    spec = ModelSpec.model_validate({"name": "echo", "base_path": base, "version_policy": {"kind": "all"}})
    async with serving_grpc(load_pass_through, [spec], metrics=Metrics()) as server:
        yield server
