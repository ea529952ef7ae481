from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from tritonclient.utils import InferenceServerException

from ovmstrio.config.specs import BatchingSpec, ModelSpec, ShapeSpec
from ovmstrio.core.tensor import Dim
from ovmstrio.runtimes.models.load_model import load_model
from tests.support import ir
from tests.support.both_doors import BothDoors, serving_both
from tests.support.servables import EXACT


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncIterator[BothDoors]:
    """Serve one model for each kind of batch."""

    def spec(name: str, model: Any, **more: Any) -> ModelSpec:
        return ModelSpec(name=name, base_path=ir.save(model, tmp_path, name), plugin_config=EXACT, **more)

    specs = [
        spec("fixed", ir.dummy()),
        spec("open", ir.dynamic()),
        spec("bounded", ir.dummy(), shapes={"b": ShapeSpec(dims=(Dim(1, 8), Dim.fixed(10)))}),
        spec("joined", ir.dynamic(), batching=BatchingSpec(max_batch_size=16, batch_timeout_ms=1)),
        spec("sums", ir.accumulator(), stateful=True),
    ]
    async with trio.open_nursery() as tasks:
        async with serving_both(specs, load=partial(load_model, tasks=tasks)) as both:
            yield both
        tasks.cancel_scope.cancel()


async def _config(doors: BothDoors, name: str) -> dict[str, Any]:
    """Return the configuration over REST, which must equal that over gRPC."""
    document: dict[str, Any] = (await doors.request("GET", f"/v2/models/{name}/config")).json()
    found = (await doors.with_triton("grpc", lambda client, _: client.get_model_config(name))).config
    assert (found.name, found.platform, found.backend) == (name, document["platform"], document["backend"])
    assert found.max_batch_size == document["max_batch_size"]
    for grpc, rest in ((found.input, document["input"]), (found.output, document["output"])):
        assert [(each.name, list(each.dims)) for each in grpc] == [(each["name"], each["dims"]) for each in rest]
    assert found.WhichOneof("scheduling_choice") == next((key for key in document if key.endswith("batching")), None)
    return document


@pytest.mark.parametrize(
    ("name", "rows", "dims"),
    [("fixed", 0, [1, 10]), ("open", 65_536, [-1]), ("bounded", 8, [10]), ("joined", 16, [-1])],
)
async def test_an_open_batch_is_not_part_of_the_dims(doors: BothDoors, name: str, rows: int, dims: list[int]) -> None:
    config = await _config(doors, name)
    assert config["max_batch_size"] == rows
    assert [each["dims"] for each in config["input"] + config["output"]] == [dims, dims]


async def test_batching_and_sequences_are_part_of_the_configuration(doors: BothDoors) -> None:
    assert (await _config(doors, "joined"))["dynamic_batching"] == {"preferred_batch_size": [16]}
    assert "sequence_batching" in await _config(doors, "sums")
    assert not {"dynamic_batching", "sequence_batching", "model_transaction_policy"} & set(
        await _config(doors, "fixed")
    )


async def test_statistics_count_successes_failures_and_times(doors: BothDoors) -> None:
    def calls(client: Any, module: Any) -> Any:
        for width in (10, 10, 3):
            given = module.InferInput("b", [1, width], "FP32")
            given.set_data_from_numpy(np.ones((1, width), np.float32))
            try:
                client.infer("fixed", [given])
            except InferenceServerException:
                assert width == 3
        return client.get_inference_statistics("fixed").model_stats

    (model,) = await doors.with_triton("grpc", calls)
    counted = model.inference_stats
    assert (model.name, model.version, model.inference_count, model.execution_count) == ("fixed", "1", 2, 2)
    assert (counted.success.count, counted.fail.count, counted.compute_infer.count) == (2, 1, 2)
    parts = counted.queue.ns + counted.compute_input.ns + counted.compute_infer.ns + counted.compute_output.ns
    assert 0 < counted.compute_infer.ns <= parts <= counted.success.ns + 4
    assert model.last_inference > 1_700_000_000_000
    documents = (await doors.request("GET", "/v2/models/stats")).json()["model_stats"]
    assert {each["name"]: each["inference_count"] for each in documents} == {
        "fixed": 2, "open": 0, "bounded": 0, "joined": 0, "sums": 0,
    }  # fmt: skip
    for path in ("/v2/models/fixed/stats", "/v2/models/fixed/versions/1/stats"):
        (document,) = (await doors.request("GET", path)).json()["model_stats"]
        assert document["inference_stats"]["success"] == {"count": 2, "ns": counted.success.ns}


async def test_statistics_of_a_version_that_is_not_a_number_are_refused(doors: BothDoors) -> None:
    def call(client: Any, _: Any) -> list[str]:
        statuses = []
        for name in ("fixed", ""):
            with pytest.raises(InferenceServerException) as caught:
                client.get_inference_statistics(name, "last")
            statuses.append(str(caught.value.status()))
        return statuses

    assert await doors.with_triton("grpc", call) == ["StatusCode.INVALID_ARGUMENT"] * 2
