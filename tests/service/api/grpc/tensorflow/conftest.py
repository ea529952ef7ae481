"""Real models behind the gRPC front end, with metrics, called through the TensorFlow Serving API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.metrics import Metrics
from ovmstrio.runtimes.models.load_model import load_model
from ovmstrio.runtimes.models.sequences import SequenceManagers
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from tests.support import ir
from tests.support.stub_registry import registry_of
from tests.unit.api.grpc.tensorflow.calls import Server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """Serve the models ``dummy`` and ``two`` and the stateful model ``sums``, as long as the test lasts."""
    sums = ir.save(ir.accumulator(), tmp_path, "sums")
    specs = [
        ModelSpec(name="dummy", base_path=ir.save(ir.dummy(), tmp_path, "dummy")),
        ModelSpec(name="two", base_path=ir.save(ir.sum_of_two(), tmp_path, "two")),
        ModelSpec(name="sums", base_path=sums, stateful=True, max_sequence_number=2),
    ]
    registry = registry_of(partial(load_model, managers=SequenceManagers()), poll_seconds=0)
    plane = DataPlane(registry, metrics=Metrics())
    front_end = GrpcFrontEnd(plane, ["127.0.0.1:0"])
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        assert not (await registry.apply(specs)).failures
        (address,) = await nursery.start(front_end.serve)
        yield Server(address, plane, registry, tmp_path, specs)
        nursery.cancel_scope.cancel()
