"""What a short inference over gRPC costs the server's thread, in calls of Python functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from benchmarks.requests import framed_infer_request
from ovmstrio.config.specs import ModelSpec
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.metrics import Metrics
from ovmstrio.observability.request_log import RequestLog
from ovmstrio.runtimes.models.load_model import load_model
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from ovmstrio.work.placement import Placement
from tests.support import ir
from tests.support.bare_http2 import BareConnection
from tests.support.python_calls import calls_of_one
from tests.support.stub_registry import registry_of

MOST = 125
"""Of 111 to 114: with room for a busy machine, and none for another habit of every call."""
TOGETHER = 10
"""So that steps of the event loop, of which there are as many as the machine likes, are shared."""
PATH = "/inference.GRPCInferenceService/ModelInfer"


@pytest.mark.parametrize(("name", "batch"), [("fixed", 1), ("dynamic", -1)])
async def test_an_inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, batch: int) -> None:
    """Of a model that adds one, with metrics and the request log, from a client that asks for ten at once."""
    # Under a profile nothing is short.
    monkeypatch.setattr(Placement, "is_inline", lambda *_: True)
    spec = ModelSpec(name=name, base_path=ir.save(ir.dummy((batch, 10)), tmp_path, name))
    metrics = Metrics()
    registry = registry_of(load_model, poll_seconds=0)
    plane = DataPlane(registry, metrics=metrics, observers=(RequestLog(),))
    front_end = GrpcFrontEnd(plane, ["127.0.0.1:0"])
    message = framed_infer_request(name, "b", np.ones((1, 10), np.float32))

    def drive(count: int) -> None:
        with BareConnection(port) as client:
            for _ in range(0, count, TOGETHER):
                begun = [client.begin(PATH, message) for _ in range(TOGETHER)]
                client.send(b"".join(data for _, data in begun))
                assert {client.wait(stream).status for stream, _ in begun} == {"0"}

    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        assert not (await registry.apply([spec])).failures
        port = int((await nursery.start(front_end.serve))[0].rpartition(":")[2])
        calls = await calls_of_one(drive)
        nursery.cancel_scope.cancel()
    assert calls <= MOST
