from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ovmstrio.core import errors
from ovmstrio.core.errors import GraphFailure, InvalidRequest, NotFound, PipelineFailure, ServerError
from ovmstrio.core.request import InferRequest
from ovmstrio.core.service import LeasedServable, Servable
from ovmstrio.pipelines.node_calls import ServableCall
from tests.support import ir
from tests.support.graphs import graph_text, inference_graph, loaded, python_node
from tests.support.pipelines import answers, call, make_node, make_pipeline, serving_pipeline, write_library
from tests.support.servables import load, raw_request

DOUBLING = """
class OvmsPythonModel:
    def execute(self, inputs):
        import numpy as np
        return [Tensor("out", np.asarray(inputs[0]) * 2)]
"""

GRAPH = graph_text(python_node("handler.py"))

CALLING = inference_graph("inner").replace('"b"', '"x"').replace('"a"', '"y"')


async def test_graph_between_two_models(tmp_path: Path) -> None:
    model = await load(ir.dummy((1, 2)), tmp_path)
    nodes = [
        make_node("one", {"b": "request.x"}, ("a",), model_name="m"),
        make_node("doubles", {"in": "one.a"}, ("out",), model_name="g"),
        make_node("two", {"b": "doubles.out"}, ("a",), model_name="m"),
    ]
    spec = make_pipeline(nodes, {"y": "two.a", "z": "doubles.out"})
    async with (
        loaded(tmp_path / "g", GRAPH, handler=DOUBLING) as graph,
        serving_pipeline(spec, m=model, g=graph) as pipeline,
    ):
        found = await call(pipeline, x=[[1, 2]])
        assert [str(spec) for spec in pipeline.metadata.inputs] == ["FP32 [1,2]"]
    assert found["y"].tolist() == [[5, 7]]
    assert found["z"].tolist() == [[4, 6]]
    await model.aclose()


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
async def test_input_of_a_graph_has_any_type_and_shape(tmp_path: Path, dtype: type[np.generic]) -> None:
    array = np.arange(6).astype(dtype).reshape(3, 1, 2)
    for count in (None, -1):
        node = make_node("doubles", {"in": "request.x"}, ("out",), model_name="g")
        spec = make_pipeline([node], {"y": "doubles.out"}, demultiply_count=count)
        async with (
            loaded(tmp_path / "g", GRAPH, handler=DOUBLING) as graph,
            serving_pipeline(spec, g=graph) as pipeline,
        ):
            found = answers(await pipeline.infer(raw_request({"x": array})))
        np.testing.assert_array_equal(found["y"], array * 2)
        assert found["y"].dtype == dtype


async def test_input_of_a_graph_needs_a_known_type(tmp_path: Path) -> None:
    spec = make_pipeline([make_node("g", {"in": "request.x"}, ("out",), model_name="g")], {"y": "g.out"})
    async with (
        loaded(tmp_path / "g", GRAPH, handler=DOUBLING) as graph,
        serving_pipeline(spec, g=graph) as pipeline,
    ):
        request = raw_request({"x": np.zeros((1, 2), np.float32)}, {"x": "FP31"})
        with pytest.raises(InvalidRequest, match=r"Invalid input precision .* Actual: FP31; input name: x"):
            await pipeline.infer(request)


async def test_failure_of_a_graph_names_the_node_of_the_pipeline(tmp_path: Path) -> None:
    handler = DOUBLING.replace("import numpy as np", "raise ValueError('no')")
    spec = make_pipeline([make_node("calls", {"in": "request.x"}, ("out",), model_name="g")], {"y": "calls.out"})
    async with (
        loaded(tmp_path / "g", GRAPH, handler=handler) as graph,
        serving_pipeline(spec, g=graph) as pipeline,
    ):
        with pytest.raises(GraphFailure, match=r'node "node" failed: .*ValueError: no.*; node: calls$'):
            await pipeline.infer(raw_request({"x": np.zeros((1, 2), np.float32)}))


@pytest.mark.parametrize("kind", [NotFound, errors.VersionRetired, errors.ServiceLoading])
async def test_unavailable_servable_names_the_node_of_the_pipeline(kind: type[ServerError]) -> None:

    async def lease(name: str, version: str = "", /) -> AbstractContextManager[LeasedServable]:
        raise kind(f"{name} {version} is gone")

    with pytest.raises(kind, match=r"^m 2 is gone; node: reads, which calls 'm'$") as caught:
        await ServableCall(lease, "reads", "m", 2)({}, InferRequest("pipeline"))
    assert type(caught.value) is kind


async def test_invalid_tensor_of_a_graph_fails_the_node(tmp_path: Path) -> None:
    for made, text in (
        ('Tensor("out", b"1234", [1, 2], "FP32")', "node 'calls' returned an invalid tensor"),
        ('Tensor("out", b"1234", [1, 2], "mine")', "node 'calls': output 'out' has unknown type 'mine'"),
    ):
        handler = DOUBLING.replace('Tensor("out", np.asarray(inputs[0]) * 2)', made)
        nodes = [make_node("calls", {"in": "request.x"}, ("out",), model_name="g")]
        async with (
            loaded(tmp_path / "g", GRAPH, handler=handler) as graph,
            serving_pipeline(make_pipeline(nodes, {"y": "calls.out"}), g=graph) as pipeline,
        ):
            with pytest.raises(PipelineFailure, match=text):
                await pipeline.infer(raw_request({"x": np.zeros((1, 2), np.float32)}))


@dataclass(frozen=True)
class _Held:
    servable: Servable


async def test_session_of_a_graph_calls_a_pipeline(tmp_path: Path) -> None:
    node = make_node("adds", {"i": "request.x"}, params={"constant": 5})
    spec = make_pipeline([node], {"y": "adds.y"}, libraries={"arithmetic": write_library(tmp_path)})
    async with serving_pipeline(spec) as pipeline:

        async def lease(name: str, version: str = "", /) -> AbstractContextManager[LeasedServable]:
            if name != "inner":
                raise NotFound(f"{name} {version}")
            return nullcontext(_Held(pipeline))

        async with loaded(tmp_path / "g", CALLING, lease) as graph:
            found = answers(await graph.infer(raw_request({"in": np.array([[1, 2]], np.float32)})))
    assert found["out"].tolist() == [[6, 7]]


async def test_pipeline_calls_a_pipeline(tmp_path: Path) -> None:
    library = {"arithmetic": write_library(tmp_path)}
    split = make_node("split", {"i": "request.x"}, params={"op": "split", "parts": 2}, demultiply_count=2)
    add = make_node("add", {"i": "split.y"}, params={"constant": 1})
    inner_spec = make_pipeline([split, add], {"y": "add.y"}, libraries=library)
    call_node = make_node("calls", {"x": "request.x"}, ("y",), model_name="inner")
    total = make_node("sum", {"i": "calls.y"}, params={"op": "gather"})
    outer_spec = make_pipeline([call_node, total], {"y": "sum.y"}, libraries=library, demultiply_count=2)
    async with (
        serving_pipeline(inner_spec) as inner,
        serving_pipeline(outer_spec.model_copy(update={"name": "outer"}), inner=inner) as outer,
    ):
        found = await call(outer, x=[[[1, 2]], [[3, 4]]])
    assert found["y"].tolist() == [[[5, 8]], [[11, 14]]]
