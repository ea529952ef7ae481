"""A gRPC front end over a real registry and data plane, served on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.metrics import Metrics
from ovmstrio.registry import Registry
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from tests.support.pass_through import PassThrough, load_pass_through
from tests.support.stub_registry import registry_of


@dataclass
class Serving:
    """A front end that serves, with what lies behind it."""

    front_end: GrpcFrontEnd
    plane: DataPlane
    registry: Registry
    spec: ModelSpec
    addresses: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.addresses[0]

    @property
    def metrics(self) -> str:
        """Every metric, as text."""
        return (self.plane.render_metrics() or b"").decode()

    @property
    def servable(self) -> PassThrough:
        """The version that the default stands for."""
        servable = self.registry.peek("echo")
        assert isinstance(servable, PassThrough)
        return servable


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve the model ``echo`` in versions 1 and 2 (the default is 2), as long as the test lasts."""
    registry = registry_of(load_pass_through, poll_seconds=0)
    plane = DataPlane(registry, metrics=Metrics())
    base = tmp_path / "echo"
    for version in ("1", "2"):
        (base / version).mkdir(parents=True)
    spec = ModelSpec.model_validate({"name": "echo", "base_path": base, "version_policy": {"kind": "all"}})
    front_end = GrpcFrontEnd(plane, ["127.0.0.1:0"])
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply([spec])
        addresses = await nursery.start(front_end.serve)
        plane.begin_serving()
        yield Serving(front_end, plane, registry, spec, addresses)
        nursery.cancel_scope.cancel()
