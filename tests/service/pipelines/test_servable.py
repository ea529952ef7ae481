from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.config.specs import PipelineSpec
from ovmstrio.core.errors import CustomNodeFailure, InvalidRequest, ModelFailure
from ovmstrio.core.request import InferInput, InferRequest
from tests.support import ir
from tests.support.native_nodes import copy_of_fixture
from tests.support.pipelines import answers, call, make_node, make_pipeline, serving_pipeline, write_library
from tests.support.servables import load
from tests.support.waits import WAIT_SECONDS

BYTES = """
    def get_inputs_info(params):
        return {"texts": ("UINT8", [-1, -1])}


    def get_outputs_info(params):
        name = params.get("output", "rows")
        return {name: ("UINT8", [-1, -1]), "size": ("INT32", [1, 2])}


    def execute(inputs, params):
        import numpy as np

        rows = inputs["texts"]
        return {params.get("output", "rows"): rows.copy(), "size": np.array([rows.shape], np.int32)}
"""


def _texts(tmp_path: Path, own: str = "rows", answered: str = "texts_string") -> PipelineSpec:
    library = write_library(tmp_path, BYTES, "texts")
    node = make_node("one", {"texts": "request.x"}, (own, "size"), library="texts", params={"output": own})
    return make_pipeline([node], {answered: f"one.{own}", "size": "one.size"}, libraries={"texts": library})


def _strings(values: Sequence[bytes]) -> InferRequest:
    raw = b"".join(struct.pack("<I", len(value)) + value for value in values)
    return InferRequest("pipeline", inputs=[InferInput("x", "BYTES", (len(values),))], raw_inputs=[raw])


@pytest.mark.parametrize(
    "values",
    [[b"String_123", b"", b"zebra"], [b""], ["żółw".encode(), b"\xff\xfe", b" "], [b"a" * 1000, b"b"]],
    ids=["of different lengths", "empty", "of any bytes", "long"],
)
async def test_strings_are_padded_rows_of_bytes(tmp_path: Path, values: list[bytes]) -> None:
    async with serving_pipeline(_texts(tmp_path)) as pipeline:
        found = answers(await pipeline.infer(_strings(values)))
    assert found["texts_string"].tolist() == values
    assert found["size"].tolist() == [[len(values), max(map(len, values)) + 1]]


@pytest.mark.parametrize(
    ("own", "answered", "is_text"),
    [("rows", "y_string", True), ("rows_string", "y", True), ("a_string", "b_string", True), ("rows", "y", False)],
)
async def test_suffix_of_an_output_name_selects_strings(tmp_path: Path, own: str, answered: str, is_text: bool) -> None:
    async with serving_pipeline(_texts(tmp_path, own, answered)) as pipeline:
        found = answers(await pipeline.infer(_strings([b"ab", b"c"])))
    expected = [b"ab", b"c"] if is_text else [[97, 98, 0], [99, 0, 0]]
    assert found[answered].tolist() == expected


async def test_string_ends_at_its_first_nul(tmp_path: Path) -> None:
    async with serving_pipeline(_texts(tmp_path)) as pipeline:
        found = answers(await pipeline.infer(_strings([b"a\0b", b"\0c"])))
    assert found["texts_string"].tolist() == [b"a", b""]


async def test_rows_of_bytes_are_not_padded(tmp_path: Path) -> None:
    rows = np.array([[97, 98], [99, 0]], np.uint8)
    request = InferRequest("p", inputs=[InferInput("x", "UINT8", (2, 2))], raw_inputs=[rows.tobytes()])
    async with serving_pipeline(_texts(tmp_path)) as pipeline:
        found = answers(await pipeline.infer(request))
    assert (found["texts_string"].tolist(), found["size"].tolist()) == ([b"ab", b"c"], [[2, 2]])


async def test_rows_are_not_converted_between_nodes(tmp_path: Path) -> None:
    model = await load(ir.passthrough("UINT8", (-1, -1), output_name="inner_string"), tmp_path)
    library = write_library(tmp_path, BYTES, "texts")
    nodes = [
        make_node("model", {"x": "request.x"}, ("inner_string",), model_name="m"),
        make_node("again", {"x": "model.inner_string"}, ("inner_string",), model_name="m"),
        make_node("rows", {"texts": "again.inner_string"}, ("rows", "size"), library="texts"),
    ]
    outputs = {"y": "rows.rows", "z": "model.inner_string"}
    spec = make_pipeline(nodes, outputs, libraries={"texts": library})
    rows = np.array([[97, 0, 98, 0]], np.uint8)
    request = InferRequest("p", inputs=[InferInput("x", "UINT8", (1, 4))], raw_inputs=[rows.tobytes()])
    async with serving_pipeline(spec, m=model) as pipeline:
        found = answers(await pipeline.infer(request))
    np.testing.assert_array_equal(found["y"], rows)
    assert found["z"].tolist() == [b"a"]
    await model.aclose()


async def test_two_hundred_concurrent_requests_get_their_outputs(tmp_path: Path) -> None:
    model = await load(ir.dummy((1, 2)), tmp_path, nireq=4)
    nodes = [
        make_node("split", {"i": "request.x"}, params={"op": "split", "parts": 3, "steps": 1}, demultiply_count=3),
        make_node("each", {"b": "split.y"}, ("a",), model_name="m"),
        make_node("sum", {"i": "each.a"}, params={"op": "gather", "steps": 2}, gather_from_node="split"),
        make_node("last", {"b": "sum.y"}, ("a",), model_name="m"),
    ]
    outputs = {"sum": "last.a", "each": "each.a"}
    spec = make_pipeline(nodes, outputs, libraries={"arithmetic": write_library(tmp_path)})
    found: dict[int, dict[str, Any]] = {}

    async def one(number: int) -> None:
        found[number] = await call(pipeline, x=[[number, -number]])

    async with serving_pipeline(spec, m=model) as pipeline, trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(one, number)
    for number in range(200):
        x = np.array([[number, -number]], np.float32)
        np.testing.assert_array_equal(found[number]["sum"], 6 * x + 4)
        np.testing.assert_array_equal(found[number]["each"], np.stack([x + 1, 2 * x + 1, 3 * x + 1]))
    await model.aclose()


async def test_cancelled_requests_return_their_inference_requests(tmp_path: Path) -> None:
    model = await load(ir.dummy((1, 2)), tmp_path, nireq=2)
    nodes = [
        make_node("split", {"i": "request.x"}, params={"op": "split", "parts": 3, "steps": 3}, demultiply_count=3),
        make_node("each", {"b": "split.y"}, ("a",), model_name="m"),
        make_node("sum", {"i": "each.a"}, params={"op": "gather", "steps": 3}, gather_from_node="split"),
    ]
    spec = make_pipeline(nodes, {"y": "sum.y"}, libraries={"arithmetic": write_library(tmp_path)})
    async with serving_pipeline(spec, m=model) as pipeline:
        tasks = trio.lowlevel.current_statistics().tasks_living
        for steps in range(50):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_after, steps, scope)
                    await call(pipeline, x=[[1, 2]])
                    nursery.cancel_scope.cancel()
            assert trio.lowlevel.current_statistics().tasks_living == tasks
            with trio.fail_after(WAIT_SECONDS):
                assert (await call(pipeline, x=[[1, 2]]))["y"].tolist() == [[9, 15]]
            if not scope.cancelled_caught:
                break
    assert 3 < steps < 49
    await model.aclose()


async def _cancel_after(steps: int, scope: trio.CancelScope) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_failure_names_its_node(tmp_path: Path) -> None:
    flexible, product = await load(ir.dummy((1, -1)), tmp_path, "a"), await load(ir.matmul(), tmp_path, "b")
    fixed = await load(ir.dummy((1, 2)), tmp_path, "c")
    nodes = [
        make_node("custom", {"i": "request.x"}, params={"op": "fail"}),
        make_node("taker", {"b": "request.y"}, ("a",), model_name="flexible"),
        make_node("fixed", {"b": "taker.a"}, ("a",), model_name="fixed"),
        make_node("product", {"x": "request.p", "y": "request.q"}, ("z",), model_name="product"),
    ]
    library = {"arithmetic": write_library(tmp_path)}
    servables = {"flexible": flexible, "fixed": fixed, "product": product}
    custom = make_pipeline(nodes[:1], {"o": "custom.y"}, libraries=library)
    async with serving_pipeline(custom, **servables) as pipeline:
        with pytest.raises(CustomNodeFailure, match=r"custom.*set to fail"):
            await call(pipeline, x=[[1, 2]])
    shapes = make_pipeline(nodes[1:3], {"o": "fixed.a"}, inputs=["y"])
    async with serving_pipeline(shapes, **servables) as pipeline:
        with pytest.raises(InvalidRequest, match=r"input name: b; node: fixed"):
            await call(pipeline, y=[[1, 2, 3]])
        assert (await call(pipeline, y=[[1, 2]]))["o"].tolist() == [[3, 4]]
    failing = make_pipeline(nodes[3:], {"o": "product.z"}, inputs=["p", "q"])
    async with serving_pipeline(failing, **servables) as pipeline:
        with pytest.raises(ModelFailure, match="node: product"):
            await call(pipeline, p=np.ones((1, 2)), q=np.ones((3, 1)))
    for servable in servables.values():
        await servable.aclose()


async def test_invalid_request_names_the_input_of_the_pipeline(tmp_path: Path) -> None:
    model = await load(ir.dummy((1, 2)), tmp_path)
    spec = make_pipeline([make_node("one", {"b": "request.x"}, ("a",), model_name="m")], {"y": "one.a"})
    async with serving_pipeline(spec, m=model) as pipeline:
        with pytest.raises(InvalidRequest, match=r"\(1,2\).*\(1,3\).*input name: x$"):
            await call(pipeline, x=[[1, 2, 3]])
        with pytest.raises(InvalidRequest, match="Invalid number of inputs"):
            await call(pipeline, x=[[1, 2]], z=[[1, 2]])
    await model.aclose()


async def test_library_that_writes_into_its_inputs_changes_no_other_tensor(tmp_path: Path) -> None:
    model = await load(ir.dummy((1, 2)), tmp_path)
    echo: dict[str, Any] = {"library": "fixture", "params": {"execute": "echo"}}
    write: dict[str, Any] = {"library": "fixture", "params": {"execute": "write"}}
    nodes = [
        make_node("echo", {"x": "request.x"}, **echo),
        make_node("writes_request", {"x": "request.x"}, **write),
        *[make_node(name, {"x": "echo.y"}, **write) for name in ("writes", "writes_again")],
        make_node("m", {"b": "echo.y"}, ("a",), model_name="m"),
    ]
    written = ("writes_request", "writes", "writes_again")
    outputs = {"x": "request.x", "y": "echo.y", "m": "m.a"} | {name: f"{name}.y" for name in written}
    spec = make_pipeline(nodes, outputs, libraries={"fixture": copy_of_fixture(tmp_path)})
    async with serving_pipeline(spec, m=model) as pipeline:
        # The library's memory must not outlast the pipeline.
        found = {name: array.copy() for name, array in (await call(pipeline, x=[[1, 2]])).items()}
    assert [found[name].tolist() for name in ("x", "y", "m")] == [[[1, 2]], [[1, 2]], [[2, 3]]]
    assert {found[name].tobytes() for name in written} == {bytes([42]) * 8}
    await model.aclose()
