from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio
from openvino import opset13 as op

from ovmstrio.config.specs import BatchSpec, ModelSpec, ShapeSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition, InvalidRequest
from ovmstrio.core.request import RequestedOutput
from ovmstrio.core.tensor import Dim
from ovmstrio.runtimes.models.load_model import load_model
from tests.support import ir
from tests.support.answers import tensors
from tests.support.servables import contents_request, load, raw_request

AUTO = ShapeSpec(auto=True)


async def test_fp16_and_bf16_are_numbers_to_the_model(tmp_path: Path) -> None:
    half = await load(ir.dummy((2,), datatype="FP16"), tmp_path, "half")
    response = await half.infer(raw_request({"b": np.array([0.5, -3], np.float16)}))
    assert tensors(response)[0].array.tolist() == [1.5, -2.0]
    brain = await load(ir.dummy((2,), datatype="BF16"), tmp_path, "brain")
    response = await brain.infer(raw_request({"b": np.array([0x3F80, 0x4000], np.uint16)}, {"b": "BF16"}))
    assert tensors(response)[0].array.tolist() == [0x4000, 0x4040]


async def test_strings_of_any_bytes_pass_through(tmp_path: Path) -> None:
    servable = await load(ir.string_passthrough((-1, -1)), tmp_path)
    for elements in ([b"a", b"", b"\xff\x00z", "é".encode()], [b"", b"", b"", b""]):
        response = await servable.infer(contents_request("strings", "BYTES", (2, 2), elements))
        assert tensors(response)[0].array.tolist() == [elements[:2], elements[2:]]
    empty = await servable.infer(contents_request("strings", "BYTES", (0, 2), []))
    assert empty.outputs[0].shape == (0, 2)
    # A UINT8 matrix takes strings, and returns strings if the name of its output ends with _string.
    matrix = await load(ir.passthrough("UINT8", (-1, -1), output_name="label_string"), tmp_path, "matrix")
    response = await matrix.infer(contents_request("x", "BYTES", (2,), [b"one", b"three"]))
    assert tensors(response)[0].datatype.name == "BYTES"
    assert tensors(response)[0].array.tolist() == [b"one", b"three"]
    assert matrix.metadata.inputs[0].datatype.name == "UINT8"


async def test_all_outputs_are_returned_in_the_order_of_their_names(tmp_path: Path) -> None:
    servable = await load(ir.sum_of_two(), tmp_path)
    request = raw_request({"y": np.full((1, 10), 2, np.float32), "x": np.full((1, 10), 5, np.float32)})
    request.outputs = [RequestedOutput("sum"), RequestedOutput("nothing")]
    request.id = "seven"
    response = await servable.infer(request)
    assert [(out.name, float(out.array[0, 0])) for out in tensors(response)] == [("difference", 3.0), ("sum", 7.0)]
    assert (response.model_name, response.model_version, response.id) == ("model", "1", "seven")


async def test_model_without_inputs_is_served(tmp_path: Path) -> None:
    constant = op.constant(np.arange(3, dtype=np.float32))
    constant.output(0).set_names({"table"})
    servable = await load(ov.Model([op.result(constant)], [], "table"), tmp_path)
    response = await servable.infer(raw_request({}))
    assert [(out.name, out.array.tolist()) for out in tensors(response)] == [("table", [0.0, 1.0, 2.0])]


async def test_input_that_is_an_output_keeps_its_name(tmp_path: Path) -> None:
    given = op.parameter([1, 2], np.float32, name="x")
    given.output(0).set_names({"x", "a"})
    relu = op.relu(given)
    relu.output(0).set_names({"y"})
    servable = await load(ov.Model([op.result(given), op.result(relu)], [given]), tmp_path)
    assert [spec.name for spec in servable.metadata.inputs] == ["x"]
    response = await servable.infer(raw_request({"x": np.array([[-1, 2]], np.float32)}))
    assert [(out.name, out.array.tolist()) for out in tensors(response)] == [("a", [[-1, 2]]), ("y", [[0, 2]])]


async def test_scalars_and_empty_tensors_are_served(tmp_path: Path) -> None:
    scalar = await load(ir.scalar(), tmp_path, "scalar")
    response = await scalar.infer(contents_request("b", "FP32", (), [2.5]))
    assert tensors(response)[0].shape == ()
    assert tensors(response)[0].array.tolist() == 3.5
    dynamic = await load(ir.dynamic(), tmp_path, "dynamic")
    response = await dynamic.infer(raw_request({"b": np.zeros((0, 10), np.float32)}))
    assert tensors(response)[0].shape == (0, 10)


async def test_closed_servable_refuses_requests(tmp_path: Path) -> None:
    servable = await load(ir.dummy(), tmp_path)
    await servable.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await servable.infer(raw_request({"b": np.zeros((1, 10), np.float32)}))


async def test_mapping_config_replaces_names(tmp_path: Path) -> None:
    base_path = ir.save(ir.dummy(), tmp_path, "model")
    mapping = {"inputs": {"b": "data"}, "outputs": {"a": "result"}}
    (base_path / "1" / "mapping_config.json").write_text(json.dumps(mapping), encoding="utf-8")
    servable = await load_model(ModelSpec(name="model", base_path=base_path), 1, base_path / "1")
    response = await servable.infer(raw_request({"data": np.ones((1, 10), np.float32)}))
    assert tensors(response)[0].name == "result"
    with pytest.raises(InvalidRequest, match="Required input: data"):
        await servable.infer(raw_request({"b": np.ones((1, 10), np.float32)}))


async def test_missing_and_corrupt_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    spec = ModelSpec(name="model", base_path=tmp_path)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        await load_model(spec, 1, tmp_path / "1")
    (tmp_path / "1" / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"model\.onnx"):
        await load_model(spec, 1, tmp_path / "1")


async def test_cancelled_load_can_be_repeated(tmp_path: Path) -> None:
    base_path = ir.save(ir.slow(256, 30), tmp_path, "model")
    spec = ModelSpec(name="model", base_path=base_path)
    with trio.move_on_after(0.001) as scope:
        await load_model(spec, 1, base_path / "1")
    assert scope.cancelled_caught
    assert (await load_model(spec, 1, base_path / "1")).metadata.name == "model"


@pytest.mark.parametrize("settings", [{"shapes": {"": AUTO}}, {"shapes": {"b": AUTO}}, {"batch": BatchSpec(auto=True)}])
async def test_automatic_shape_follows_requests(settings: dict[str, Any], tmp_path: Path) -> None:
    servable = await load(ir.dummy(), tmp_path, **settings)
    assert servable.metadata.inputs[0].shape == (Dim.fixed(1), Dim.fixed(10))
    for batch in (1, 4, 4, 2):
        response = await servable.infer(raw_request({"b": np.ones((batch, 10), np.float32)}))
        np.testing.assert_array_equal(tensors(response)[0].array, np.full((batch, 10), 2, np.float32))
        assert servable.metadata.inputs[0].shape[0] == Dim.fixed(batch)


async def test_automatic_batch_keeps_other_dimensions(tmp_path: Path) -> None:
    servable = await load(ir.dummy(), tmp_path, batch=BatchSpec(auto=True))
    with pytest.raises(InvalidRequest, match="Invalid input shape"):
        await servable.infer(raw_request({"b": np.ones((2, 11), np.float32)}))
    with pytest.raises(InvalidRequest, match="Invalid number of shape dimensions"):
        await servable.infer(raw_request({"b": np.ones((10,), np.float32)}))


async def test_impossible_automatic_shape_is_refused_and_the_old_one_is_kept(tmp_path: Path) -> None:
    servable = await load(ir.sum_of_two(), tmp_path, shapes={"": AUTO})
    ones = np.ones((1, 10), np.float32)
    with pytest.raises(FailedPrecondition, match="Model could not be reshaped with requested shape"):
        await servable.infer(raw_request({"x": np.ones((1, 3), np.float32), "y": np.ones((1, 4), np.float32)}))
    response = await servable.infer(raw_request({"x": ones, "y": ones}))
    np.testing.assert_array_equal(tensors(response)[1].array, ones * 2)
    assert servable.metadata.inputs[0].shape == (Dim.fixed(1), Dim.fixed(10))


async def test_concurrent_requests_of_different_shapes_are_answered(tmp_path: Path) -> None:
    servable = await load(ir.dummy(), tmp_path, shapes={"": AUTO})
    shapes: list[tuple[int, ...]] = []

    async def call(batch: int) -> None:
        response = await servable.infer(raw_request({"b": np.full((batch, 10), batch, np.float32)}))
        assert (tensors(response)[0].array == batch + 1).all()
        shapes.append(tensors(response)[0].shape)

    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(call, number % 3 + 1)
    assert sorted(shapes) == sorted((number % 3 + 1, 10) for number in range(12))


async def test_automatic_batch_is_refused_for_scalars(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not for inputs without dimensions, such as 'b'"):
        await load(ir.scalar(), tmp_path, batch=BatchSpec(auto=True))
