"""Triton's classification, and its settings of traces and logs, as its own clients use them."""

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
    """Ask for so many classes of the one output of a model."""

    def work(client: Any, module: Any) -> Any:
        known = client.get_model_metadata(model, **({"as_json": True} if door == "grpc" else {}))
        (given,), (wanted,) = known["inputs"], known["outputs"]
        tensor = module.InferInput(given["name"], list(array.shape), given["datatype"])
        tensor.set_data_from_numpy(array)
        outputs = [module.InferRequestedOutput(wanted["name"], class_count=count)]
        return client.infer(model, [tensor], outputs=outputs).as_numpy(wanted["name"])

    return await serving.with_triton(door, work)


@pytest.mark.parametrize("door", DOORS)
async def test_the_largest_elements_are_told_with_their_labels(serving: BothDoors, door: str) -> None:
    """Row by row; an index behind the last label has none, and NaN is no class before all others."""
    found = await classify(serving, door, "labelled", X, 2)

    assert found.tolist() == [[b"3.000000:1:dog", b"2.000000:3"], [b"9.000000:0:cat", b"7.250000:3"]]


@pytest.mark.parametrize("door", DOORS)
async def test_without_labels_there_are_indices(serving: BothDoors, door: str) -> None:
    """Of one dimension all is one row; more classes than elements are as many as there are; numbers stay whole."""
    plain = await classify(serving, door, "plain", X, 1)
    integers = await classify(serving, door, "integers", np.array([3, -7, 12, 0], np.int32), 9)

    assert plain.tolist() == [[b"3.000000:1"], [b"9.000000:0"]]
    assert integers.tolist() == [b"12:2", b"3:0", b"0:3", b"-7:1"]


@pytest.mark.parametrize("door", DOORS)
async def test_texts_have_no_classes(serving: BothDoors, door: str) -> None:
    """The refusal names the output."""
    with pytest.raises(InferenceServerException, match="classification needs numbers, and this is BYTES"):
        await classify(serving, door, "strings", np.array([b"a"], object), 1)


@pytest.mark.parametrize("door", DOORS)
async def test_a_number_of_classes_is_none_below_zero(serving: BothDoors, door: str) -> None:
    """It is refused before the call is made."""
    with pytest.raises(InferenceServerException, match="expected a number of classes"):
        await classify(serving, door, "plain", X, -1)


@pytest.mark.parametrize("door", DOORS)
async def test_traces_are_off_and_stay_off(serving: BothDoors, door: str) -> None:
    """They may be turned off, for one model as well; turning them on is refused, and never passed over."""
    options = {"as_json": True} if door == "grpc" else {}

    def work(client: Any, _: Any) -> Any:
        told = [
            client.get_trace_settings(**options),
            client.update_trace_settings(model_name="plain", settings={"trace_level": ["OFF"]}, **options),
        ]
        with pytest.raises(
            InferenceServerException, match=r"traces in Triton's form are not written.*/v2/models/stats and /metrics"
        ):
            client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
        with pytest.raises(
            InferenceServerException, match=r"traces in Triton's form are not written.*/v2/models/stats and /metrics"
        ):
            client.update_trace_settings(settings={"trace_rate": "1"})
        return [each["settings"] if door == "grpc" else each for each in told]

    for told in await serving.with_triton(door, work):
        level = told["trace_level"]
        assert (level["value"] if door == "grpc" else level) == ["OFF"]
