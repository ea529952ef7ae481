"""What load generators ask before and after their work: configurations and statistics, over both doors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trio

from ovmstrio.config.specs import BatchingSpec, ModelSpec, ShapeSpec
from ovmstrio.core.tensor import Dim
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.runtimes.models.load_model import load_model
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from ovmstrio.server.rest_front_end import RestFrontEnd
from tests.support import ir
from tests.support.grpc_clients import with_triton
from tests.support.servables import EXACT
from tests.support.stub_registry import registry_of
from tests.support.waits import WAIT_SECONDS


@dataclass
class Doors:
    """Where the models are served."""

    grpc: str
    rest: str

    async def get(self, path: str) -> Any:
        """Ask for a document over REST."""

        def work() -> Any:
            answer = httpx.get(f"http://{self.rest}{path}", timeout=WAIT_SECONDS, trust_env=False)
            return answer.raise_for_status().json()

        return await trio.to_thread.run_sync(work)

    async def config(self, name: str) -> dict[str, Any]:
        """Give a configuration, which both doors tell alike."""
        document: dict[str, Any] = await self.get(f"/v2/models/{name}/config")
        ask = partial(with_triton, self.grpc)
        told = (await ask(lambda client: client.get_model_config(name))).config
        assert (told.name, told.platform, told.backend) == (name, document["platform"], document["backend"])
        assert told.max_batch_size == document["max_batch_size"]
        for ours, theirs in ((told.input, document["input"]), (told.output, document["output"])):
            assert [(each.name, list(each.dims)) for each in ours] == [(each["name"], each["dims"]) for each in theirs]
        assert told.WhichOneof("scheduling_choice") == next((key for key in document if key.endswith("batching")), None)
        return document


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncIterator[Doors]:
    """Serve one model of each sort as long as the test lasts."""

    def spec(name: str, model: Any, **more: Any) -> ModelSpec:
        return ModelSpec(name=name, base_path=ir.save(model, tmp_path, name), plugin_config=EXACT, **more)

    bounded = {"b": ShapeSpec(dims=(Dim(1, 8), Dim.fixed(10)))}
    specs = [
        spec("fixed", ir.dummy()),
        spec("open", ir.dynamic()),
        spec("bounded", ir.dummy(), shapes=bounded),
        spec("joined", ir.dynamic(), batching=BatchingSpec(max_batch_size=16, batch_timeout_ms=1)),
        spec("sums", ir.accumulator(), stateful=True),
    ]
    async with trio.open_nursery() as tasks:
        registry = registry_of(partial(load_model, tasks=tasks), poll_seconds=0)
        plane = DataPlane(registry)
        async with trio.open_nursery() as nursery:
            await nursery.start(registry.run)
            assert not (await registry.apply(specs)).failures
            grpc = await nursery.start(GrpcFrontEnd(plane, ["127.0.0.1:0"]).serve)
            rest = await nursery.start(RestFrontEnd(plane, ["127.0.0.1:0"]).serve)
            plane.begin_serving()
            yield Doors(grpc[0], rest[0])
            nursery.cancel_scope.cancel()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("name", "rows", "dims"),
    [("fixed", 0, [1, 10]), ("open", 65_536, [-1]), ("bounded", 8, [10]), ("joined", 16, [-1])],
)
async def test_an_open_batch_is_no_part_of_the_shape(doors: Doors, name: str, rows: int, dims: list[int]) -> None:
    """Clients put their batch before ``dims`` where ``max_batch_size`` allows one."""
    config = await doors.config(name)
    assert config["max_batch_size"] == rows
    assert [each["dims"] for each in config["input"] + config["output"]] == [dims, dims]


async def test_joined_requests_and_sequences_are_told(doors: Doors) -> None:
    """By these a client knows how a model is called."""
    assert (await doors.config("joined"))["dynamic_batching"] == {"preferred_batch_size": [16]}
    assert "sequence_batching" in await doors.config("sums")
    assert not {"dynamic_batching", "sequence_batching", "model_transaction_policy"} & set(await doors.config("fixed"))


async def test_statistics_count_what_was_answered_and_what_failed(doors: Doors) -> None:
    """The parts of the time add up to the whole; what was never called is there with zeros."""

    def calls(client: Any) -> Any:
        from tritonclient.grpc import InferInput
        from tritonclient.utils import InferenceServerException

        for width in (10, 10, 3):
            given = InferInput("b", [1, width], "FP32")
            given.set_data_from_numpy(np.ones((1, width), np.float32))
            try:
                client.infer("fixed", [given])
            except InferenceServerException:
                assert width == 3
        return client.get_inference_statistics("fixed").model_stats

    (told,) = await with_triton(doors.grpc, calls)
    counted = told.inference_stats
    assert (told.name, told.version, told.inference_count, told.execution_count) == ("fixed", "1", 2, 2)
    assert (counted.success.count, counted.fail.count, counted.compute_infer.count) == (2, 1, 2)
    parts = counted.queue.ns + counted.compute_input.ns + counted.compute_infer.ns + counted.compute_output.ns
    assert 0 < counted.compute_infer.ns <= parts <= counted.success.ns + 4
    assert told.last_inference > 1_700_000_000_000
    documents = (await doors.get("/v2/models/stats"))["model_stats"]
    assert {each["name"]: each["inference_count"] for each in documents} == {
        "fixed": 2, "open": 0, "bounded": 0, "joined": 0, "sums": 0,
    }  # fmt: skip
    for path in ("/v2/models/fixed/stats", "/v2/models/fixed/versions/1/stats"):
        (document,) = (await doors.get(path))["model_stats"]
        assert document["inference_stats"]["success"] == {"count": 2, "ns": counted.success.ns}


async def test_statistics_of_a_version_that_is_no_number_are_refused(doors: Doors) -> None:
    """With a name and without one."""

    def call(client: Any) -> list[str]:
        from tritonclient.utils import InferenceServerException

        said = []
        for name in ("fixed", ""):
            with pytest.raises(InferenceServerException) as caught:
                client.get_inference_statistics(name, "last")
            said.append(str(caught.value.status()))
        return said

    assert await with_triton(doors.grpc, call) == ["StatusCode.INVALID_ARGUMENT"] * 2
