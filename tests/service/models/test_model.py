from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openvino import opset13 as op

from ovmstrio.config.shapes import parse_shape_buckets
from ovmstrio.config.specs import BatchingSpec, BatchSpec, ModelSpec, ShapeSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition, InvalidRequest, ModelFailure, PayloadTooLarge, Problem
from ovmstrio.core.hooks import NULL_HOOKS
from ovmstrio.core.request import RequestedOutput
from ovmstrio.core.tensor import Dim
from ovmstrio.inference.infer_requests import Slot
from ovmstrio.models.loading import load_model
from ovmstrio.models.servable import ModelServable
from tests.support import ir
from tests.support.examples import examples
from tests.support.servables import EXACT, RecordingHooks, contents_request, load, load_batched, raw_request, tensors

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
    with pytest.raises(ConfigError, match="the input 'b' has no dimensions"):
        await load(ir.scalar(), tmp_path, batch=BatchSpec(auto=True))


Shapes = list[tuple[int, ...]]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """Return a list that gets the shape of the first input of each inference."""
    recorded: Shapes = []
    bind = Slot.bind

    def record(slot: Slot, arrays: Any) -> None:
        recorded.append(arrays[0].shape)
        bind(slot, arrays)

    monkeypatch.setattr(Slot, "bind", record)
    return recorded


async def _load(
    model: ov.Model, path: Path, name: str = "model", hooks: Any = NULL_HOOKS, **buckets: Any
) -> ModelServable:
    return await load(model, path, name, hooks=hooks, shape_buckets=parse_shape_buckets(buckets))


async def answers(servable: ModelServable, **arrays: Any) -> dict[str, Any]:
    return {tensor.name: tensor.array for tensor in tensors(await servable.infer(raw_request(arrays)))}


def numbers(*shape: int) -> Any:
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


async def test_requests_are_padded_to_the_next_bucket_and_outputs_are_cut_back(tmp_path: Path, shapes: Shapes) -> None:
    hooks = RecordingHooks()
    servable = await _load(ir.dummy((-1, 3)), tmp_path, hooks=hooks, batch={"sizes": [2, 4], "warm_up": False})
    shapes.clear()
    for rows in (0, 1, 2, 3, 4, 3):
        b = numbers(rows, 3)
        assert np.array_equal((await answers(servable, b=b))["a"], b + 1)
    assert shapes == [(2, 3)] * 3 + [(4, 3)] * 3
    assert hooks.fits[1:] == [("padded", 3, 3), ("exact", 6, 0), ("padded", 9, 3), ("exact", 12, 0), ("padded", 9, 3)]
    await servable.aclose()


async def test_requests_larger_than_the_largest_bucket_are_refused(tmp_path: Path) -> None:
    servable = await _load(ir.dummy((-1, 3)), tmp_path, rows={"sizes": [2, 4], "inputs": {"b": 0}})
    with pytest.raises(InvalidRequest, match=r"at most 4 in dimension 0, the largest of the buckets 2, 4 of 'rows'"):
        await answers(servable, b=numbers(5, 3))
    assert (await answers(servable, b=numbers(4, 3)))["a"].shape == (4, 3)


async def test_larger_requests_run_unpadded_if_configured(tmp_path: Path, shapes: Shapes) -> None:
    hooks = RecordingHooks()
    columns = {"sizes": [4], "inputs": {"b": 1}}
    batch = {"sizes": [2], "larger": "run"}
    servable = await _load(ir.dynamic(), tmp_path, hooks=hooks, batch=batch, columns=columns)
    shapes.clear()
    b = numbers(5, 3)
    assert np.array_equal((await answers(servable, b=b))["a"], b + 1)
    assert (shapes, hooks.fits) == ([(5, 4)], [("larger", 15, 5)])


def average() -> ov.Model:
    """Make the average ``y`` of what is not 0 in ``mask`` in each row of ``x``, and with ``total`` the sum of both."""
    x, mask = ir.parameter("x", [-1, -1]), ir.parameter("mask", [-1, -1], "INT64")
    weights, axis = op.convert(mask, "f32"), op.constant(np.array([1], np.int64))
    sums = op.reduce_sum(op.multiply(x, weights), axis, keep_dims=False)
    mean = op.divide(sums, op.reduce_sum(weights, axis, keep_dims=False))
    return ir.named_model({"y": mean, "total": op.add(x, weights)}, [x, mask])


WORDS = {"sizes": [4, 8], "inputs": {"x": 1, "mask": 1}}


async def test_inputs_are_padded_with_their_configured_values(tmp_path: Path) -> None:
    servable = await _load(average(), tmp_path, batch=[2, 4], words={**WORDS, "pad": {"x": 1000}})
    got = await answers(servable, x=numbers(3, 5), mask=np.ones((3, 5), np.int64))
    assert got["y"].tolist() == [3, 8, 13]
    assert np.array_equal(got["total"], numbers(3, 5) + 1)


async def test_inputs_that_differ_in_a_dimension_are_refused(tmp_path: Path) -> None:
    servable = await _load(average(), tmp_path, words=WORDS)
    with pytest.raises(InvalidRequest, match=r"one size of 'words' \(shape_buckets\).*5 in dimension 1 of x") as caught:
        await answers(servable, x=numbers(3, 5), mask=np.ones((3, 1), np.int64))
    assert "1 in dimension 1 of mask" in str(caught.value)


async def remarks(model: ov.Model, path: Path, **buckets: Any) -> list[Problem]:
    found: list[Problem] = []
    spec = ModelSpec(
        name="m", base_path=ir.save(model, path, "m"), plugin_config=EXACT, shape_buckets=parse_shape_buckets(buckets)
    )
    await load_model(spec, 1, spec.base_path / "1", warn=found.append)
    return found


async def test_outputs_that_padding_changes_are_reported_by_the_load(tmp_path: Path) -> None:
    x = ir.parameter("x", [-1, -1])
    mean = op.reduce_mean(x, op.constant(np.array([1], np.int64)), keep_dims=False)
    model = ir.named_model({"mean": mean, "same": op.relu(x)}, [x])
    words = {"sizes": [4, 8], "inputs": {"x": 1}}
    (warning,) = await remarks(model, tmp_path / "1", words=words, batch=[4])
    assert (warning.severity, warning.path) == ("warning", "shape_buckets.words")
    assert "output 'mean' changes when inputs are padded" in warning.message
    assert not await remarks(model, tmp_path / "2", batch=[4])
    assert not await remarks(average(), tmp_path / "3", batch=[4], words=WORDS)


async def test_buckets_are_warmed_up_by_the_load(tmp_path: Path, shapes: Shapes) -> None:
    words = {"sizes": [3, 9], "inputs": {"b": 1}}
    await _load(ir.dynamic(), tmp_path, batch=[2, 4], words=words)
    assert {(2, 3), (2, 9), (4, 3), (4, 9)} <= set(shapes)
    shapes.clear()
    await _load(ir.dynamic(), tmp_path, "m", batch={"sizes": [5, 7], "warm_up": False}, words=words)
    assert {(5, 3), (5, 9)} <= set(shapes)
    assert not {(7, 3), (7, 9)} & set(shapes)


async def test_model_that_fails_on_padded_inputs_is_served_with_a_warning(tmp_path: Path) -> None:
    shape, rows = ir.parameter("shape", [2], "INT64"), ir.parameter("rows", [-1])
    shaped = op.reshape(rows, shape, special_zero=False)
    model = ir.named_model({"y": shaped, "same": op.negative(rows)}, [rows, shape])
    batch = {"sizes": [4], "inputs": {"rows": 0}, "outputs": {"same": 0}}
    (warning,) = await remarks(model, tmp_path / "1", batch=batch)
    assert (warning.severity, warning.path) == ("warning", "shape_buckets")
    servable = await _load(model, tmp_path / "2", batch=batch)
    got = await answers(servable, shape=np.array([2, 2]), rows=numbers(3))
    assert (got["y"].tolist(), got["same"].tolist()) == ([[1, 2], [3, 0]], [-1, -2, -3])


async def test_output_that_does_not_follow_as_configured_is_a_failure(tmp_path: Path) -> None:
    x = ir.parameter("x", [-1])
    model = ir.named_model({"sum": op.reduce_sum(x, op.constant(np.array([0], np.int64)), keep_dims=True)}, [x])
    words = {"sizes": [4], "inputs": {"x": 0}, "outputs": {"sum": 0}}
    servable = await _load(model, tmp_path, words=words)
    assert (await answers(servable, x=numbers(4)))["sum"].tolist() == [10]
    with pytest.raises(ModelFailure, match=r"'sum'.*expected 4 in dimension 0.*got the shape \[1\]"):
        await answers(servable, x=numbers(3))


async def test_size_limit_of_outputs_leaves_out_padding(tmp_path: Path) -> None:
    servable = await _load(ir.dummy((-1,)), tmp_path, batch=[1000])
    request = raw_request({"b": numbers(10)})
    request.max_output_bytes = 40
    assert tensors(await servable.infer(request))[0].array.shape == (10,)
    request.max_output_bytes = 39
    with pytest.raises(PayloadTooLarge, match="the outputs have 40 bytes, the limit is 39"):
        await servable.infer(request)


async def test_large_requests_are_padded_in_a_thread(tmp_path: Path) -> None:
    servable = await _load(ir.dummy((-1,)), tmp_path, batch={"sizes": [2**20], "warm_up": False})
    b = numbers(2**19 + 1)
    assert np.array_equal((await answers(servable, b=b))["a"], b + 1)


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT16", "INT64", "FP16", "BF16", "FP64"])
async def test_every_datatype_of_numbers_is_padded(tmp_path: Path, datatype: str) -> None:
    servable = await _load(ir.passthrough(datatype, (-1, 2)), tmp_path, batch=[4])
    dtype = {"BOOL": np.bool_, "BF16": np.uint16, "FP16": np.float16, "FP64": np.float64}.get(datatype)
    x = np.array([[1, 0], [1, 1], [0, 1]], dtype or datatype.lower())
    response = await servable.infer(raw_request({"x": x}, {"x": datatype}))
    assert np.array_equal(tensors(response)[0].array, x)


async def test_batch_is_joined_and_then_padded(tmp_path: Path, shapes: Shapes) -> None:
    hooks, got = RecordingHooks(), {}
    buckets = parse_shape_buckets({"batch": [4, 8]})
    batching = BatchingSpec(max_batch_size=3, batch_timeout_ms=3_600_000)
    async with trio.open_nursery() as tasks:
        servable = await load_batched(ir.dummy((-1, 2)), tmp_path, tasks, batching, hooks=hooks, shape_buckets=buckets)
        shapes.clear()

        async def call(value: int) -> None:
            response = await servable.infer(raw_request({"b": np.full((1, 2), value, np.float32)}))
            got[value] = tensors(response)[0].array.tolist()

        async with trio.open_nursery() as calls:
            for value in (1, 2, 3):
                calls.start_soon(call, value)
        assert got == {value: [[value + 1, value + 1]] for value in (1, 2, 3)}
        assert (shapes, hooks.batch_sizes, hooks.fits) == ([(4, 2)], [3], [("padded", 6, 2)])
        with pytest.raises(InvalidRequest, match="at most 8 in dimension 0"):
            await servable.infer(raw_request({"b": numbers(9, 2)}))
        await servable.aclose()


STEPS = {
    "relu": op.relu,
    "negative": op.negative,
    "turned": lambda node: op.transpose(node, op.constant(np.array([1, 0, 2], np.int64))),
    "mixed": lambda node: op.matmul(node, op.constant(np.eye(3, dtype=np.float32) * 2 + 1), False, False),
    "shares": lambda node: op.softmax(node, 2),
    "reshaped": lambda node: op.reshape(node, op.shape_of(node), special_zero=False),
    "doubled": lambda node: op.concat([node, node], 2),
    "pairs": lambda node: op.matmul(node, node, False, True),
    "sums": lambda node: op.reduce_sum(node, op.constant(np.array([2], np.int64)), keep_dims=False),
    "running": lambda node: op.cum_sum(node, op.constant(np.int64(1))),
}
"""Steps that keep rows apart and use no later positions."""
BEFORE = ["relu", "negative", "mixed", "shares", "reshaped"]


@st.composite
def models(draw: st.DrawFn) -> ov.Model:
    """Return models of an input ``x`` [rows, positions, 3] with one to three outputs."""
    x = ir.parameter("x", [-1, -1, 3])
    outputs = {}
    for index in range(draw(st.integers(1, 3))):
        node = x
        for step in draw(st.lists(st.sampled_from(BEFORE), max_size=3)):
            node = STEPS[step](node)
        outputs[f"y{index}"] = STEPS[draw(st.sampled_from(sorted(STEPS)))](node)
    return ir.named_model(outputs, [x])


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True).map(sorted)


@given(models(), SIZES, SIZES, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_outputs_with_buckets_are_those_without(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: Shapes,
    model: ov.Model,
    rows: list[int],
    positions: list[int],
    requests: list[tuple[int, int]],
) -> None:
    folder = tmp_path_factory.mktemp("models")
    places = {"sizes": positions, "inputs": {"x": 1}}
    buckets = parse_shape_buckets({"rows": {"sizes": rows, "inputs": {"x": 0}}, "positions": places})

    async def compare() -> None:
        plain, padded = await load(model, folder / "a"), await load(model, folder / "b", shape_buckets=buckets)
        random = np.random.default_rng(1)
        seen = set()
        for size in requests:
            x = random.normal(size=(*size, 3)).astype(np.float32)
            shapes.clear()
            if size[0] > rows[-1] or size[1] > positions[-1]:
                with pytest.raises(InvalidRequest):
                    await answers(padded, x=x)
                continue
            got = await answers(padded, x=x)
            seen |= set(shapes)
            for name, expected in (await answers(plain, x=x)).items():
                assert np.allclose(got[name], expected, rtol=1e-4, atol=1e-4)
                assert got[name].shape == expected.shape
        assert seen <= {(row, position, 3) for row in rows for position in positions}

    trio.run(compare)
