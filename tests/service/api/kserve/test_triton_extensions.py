from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from ovmstrio.config.specs import ModelSpec
from tests.support import ir
from tests.support.both_doors import DOORS, BothDoors, serving_both
from tests.support.servables import EXACT

X = np.array([[0.5, 3.0, -1.0, 2.0], [9.0, 1.0, np.nan, 7.25]], np.float32)


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[BothDoors]:
    """Serve a model with labels for three of its four classes, one without any, and one of integers."""
    bases = {
        "labelled": ir.save(ir.passthrough("FP32", (2, 4)), tmp_path, "labelled"),
        "plain": ir.save(ir.passthrough("FP32", (2, 4)), tmp_path, "plain"),
        "integers": ir.save(ir.passthrough("INT32", (4,)), tmp_path, "integers"),
        "strings": ir.save(ir.string_passthrough(), tmp_path, "strings"),
    }
    (bases["labelled"] / "labels.txt").write_text("cat\ndog\ncow\n")
    specs = [ModelSpec(name=name, base_path=base, plugin_config=EXACT) for name, base in bases.items()]
    async with serving_both(specs) as both:
        yield both


async def classify(serving: BothDoors, door: str, model: str, array: Any, count: int) -> Any:
    def work(client: Any, module: Any) -> Any:
        known = client.get_model_metadata(model, **({"as_json": True} if door == "grpc" else {}))
        (given,), (wanted,) = known["inputs"], known["outputs"]
        tensor = module.InferInput(given["name"], list(array.shape), given["datatype"])
        tensor.set_data_from_numpy(array)
        outputs = [module.InferRequestedOutput(wanted["name"], class_count=count)]
        return client.infer(model, [tensor], outputs=outputs).as_numpy(wanted["name"])

    return await serving.with_triton(door, work)


@pytest.mark.parametrize("door", DOORS)
async def test_the_largest_elements_of_each_row_have_index_and_label(serving: BothDoors, door: str) -> None:
    found = await classify(serving, door, "labelled", X, 2)
    assert found.tolist() == [[b"3.000000:1:dog", b"2.000000:3"], [b"9.000000:0:cat", b"7.250000:3"]]


@pytest.mark.parametrize("door", DOORS)
async def test_classes_without_labels_have_indices(serving: BothDoors, door: str) -> None:
    plain = await classify(serving, door, "plain", X, 1)
    integers = await classify(serving, door, "integers", np.array([3, -7, 12, 0], np.int32), 9)
    assert plain.tolist() == [[b"3.000000:1"], [b"9.000000:0"]]
    assert integers.tolist() == [b"12:2", b"3:0", b"0:3", b"-7:1"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("model", "array", "count", "text"),
    [
        ("strings", np.array([b"a"], object), 1, "classification needs numbers, and this is BYTES"),
        ("plain", X, -1, "expected a number of classes"),
    ],
)
async def test_invalid_classifications_are_refused(
    serving: BothDoors, door: str, model: str, array: Any, count: int, text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text):
        await classify(serving, door, model, array, count)


@pytest.mark.parametrize("door", DOORS)
async def test_traces_can_be_turned_off_but_not_on(serving: BothDoors, door: str) -> None:
    options = {"as_json": True} if door == "grpc" else {}

    def work(client: Any, _: Any) -> Any:
        found = [
            client.get_trace_settings(**options),
            client.update_trace_settings(model_name="plain", settings={"trace_level": ["OFF"]}, **options),
        ]
        refusal = r"traces in Triton's form are not written.*/v2/models/stats and /metrics"
        for settings in ({"trace_level": ["TIMESTAMPS"]}, {"trace_rate": "1"}):
            with pytest.raises(InferenceServerException, match=refusal):
                client.update_trace_settings(settings=settings)
        return [each["settings"] if door == "grpc" else each for each in found]

    for settings in await serving.with_triton(door, work):
        level = settings["trace_level"]
        assert (level["value"] if door == "grpc" else level) == ["OFF"]


@pytest.mark.parametrize("door", DOORS)
async def test_the_server_name_is_configurable(door: str) -> None:
    async with serving_both([], server_name="triton") as both:
        metadata = await both.with_triton(door, lambda client, _: client.get_server_metadata())
    assert (metadata["name"] if door == "http" else metadata.name) == "triton"
