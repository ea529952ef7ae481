from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import GraphFailure, InvalidRequest, PayloadTooLarge
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.tensor import RawTensor
from tests.support.graphs import GRAPH, LOOPBACK, ask, graph_text, loaded, python_node, texts

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.core.request import InferResponse

ADD = """
import numpy as np
class OvmsPythonModel:
    def initialize(self, kwargs):
        self.name = kwargs["output_names"][0]
        self.step = int(kwargs["node_name"][-1])
    def execute(self, inputs):
        array = np.array(inputs[0])
        return [Tensor(self.name, (array + self.step).astype(array.dtype))]
"""

NUMBERS = ["INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64", "FP16", "FP32", "FP64"]


def output_array(response: InferResponse, name: str = "out") -> np.ndarray[Any, Any]:
    (output,) = (each for each in response.outputs if each.name == name)
    assert isinstance(output, RawTensor)
    return np.frombuffer(output.data, BY_NAME[output.datatype].numpy).reshape(output.shape)


def typed(datatype: str, array: np.ndarray[Any, Any]) -> InferRequest:
    return InferRequest(GRAPH, inputs=[InferInput("in", datatype, array.shape)], raw_inputs=[array.tobytes()])


@pytest.mark.parametrize("form", ["{name}", "{tag}:{name}", "{tag}:0:{name}"])
async def test_chain_of_three_nodes_computes(tmp_path: Path, form: str) -> None:
    streams = ["in", "second", "third", "out"]
    nodes = [
        python_node("add.py", [form.format(tag="A", name=a)], [form.format(tag="B", name=b)], name=f"n{number}")
        for number, (a, b) in enumerate(itertools.pairwise(streams), start=1)
    ]
    async with loaded(tmp_path / "g", graph_text(*nodes), add=ADD) as graph:
        response = await graph.infer(ask({"in": np.array([1, 2, 3])}))
    assert output_array(response).tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("datatype", "shape"),
    [*((datatype, (2, 2)) for datatype in NUMBERS), ("FP32", ()), ("FP32", (0,)), ("FP32", (2, 0, 3))],
)
async def test_datatype_and_shape_are_kept(tmp_path: Path, datatype: str, shape: tuple[int, ...]) -> None:
    array = np.full(shape, 3, BY_NAME[datatype].numpy)
    async with loaded(tmp_path / "g", graph_text(python_node("add.py", name="n1")), add=ADD) as graph:
        response = await graph.infer(typed(datatype, array))
    (output,) = response.outputs
    assert isinstance(output, RawTensor)
    assert output.datatype == datatype
    assert output_array(response).tolist() == np.full(shape, 4).tolist()


async def test_outputs_have_the_order_of_the_graph(tmp_path: Path) -> None:
    nodes = [python_node("add.py", outputs=[f"OUT:out{n}"], name=f"n{n}") for n in (1, 2)]
    outputs = ["OVMS_PY_TENSOR_B:out2", "OVMS_PY_TENSOR_A:out1"]
    async with loaded(tmp_path / "g", graph_text(*nodes, outputs=outputs), add=ADD) as graph:
        response = await graph.infer(ask({"in": np.array([5])}, id="mine"))
    assert [output.name for output in response.outputs] == ["out2", "out1"]
    assert [output_array(response, name).tolist() for name in ("out1", "out2")] == [[6], [7]]
    assert (response.id, response.model_name, response.model_version) == ("mine", "graph", "1")
    assert isinstance(response.parameters["OVMS_MP_TIMESTAMP"], int)


async def test_inputs_come_in_the_order_of_tags(tmp_path: Path) -> None:
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("out", b"".join(map(bytes, inputs)))]
    """
    node = python_node("join.py", ["B:b", "A:a", "C:c"])
    inputs = [f"OVMS_PY_TENSOR_{name.upper()}:{name}" for name in "cab"]
    async with loaded(tmp_path / "g", graph_text(node, inputs=inputs), join=source) as graph:
        response = await graph.infer(ask({"c": b"3", "a": b"1", "b": b"2"}))
    assert texts(response) == {"out": "123"}


async def test_missing_and_unknown_inputs_are_refused(tmp_path: Path) -> None:
    node = python_node("add.py", ["A:in", "B:more"], name="n1")
    text = graph_text(node, inputs=["OVMS_PY_TENSOR_A:in", "OVMS_PY_TENSOR_B:more"])
    async with loaded(tmp_path / "g", text, add=ADD) as graph:
        with pytest.raises(
            InvalidRequest, match="Invalid number of inputs - Not all input packets created; missing: more"
        ):
            await graph.infer(ask({"in": np.array([1])}))
        with pytest.raises(InvalidRequest, match="Unexpected input - unknown is unexpected"):
            await graph.infer(ask({"in": np.array([1]), "unknown": b""}))
        with pytest.raises(InvalidRequest, match=r"Also: Invalid number of inputs .* missing: more"):
            await graph.infer(ask({"in": np.array([1]), "unknown": b""}))


async def test_output_without_packet_is_a_failure(tmp_path: Path) -> None:
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            return []
    """
    async with loaded(tmp_path / "g", graph_text(python_node("nothing.py")), nothing=source) as graph:
        with pytest.raises(GraphFailure, match='Unknown error during mediapipe execution: nothing came out of "out"'):
            await graph.infer(ask({"in": b"x"}))


async def test_node_runs_without_the_input_of_a_silent_node(tmp_path: Path) -> None:
    silent = """
    class OvmsPythonModel:
        def execute(self, inputs):
            return []
    """
    count = """
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("out", b"%d" % len(inputs))]
    """
    text = graph_text(
        python_node("silent.py", outputs=["OUT:a"], name="silent"),
        python_node("add.py", outputs=["OUT:b"], name="n1"),
        python_node("count.py", ["A:a", "B:b"], name="count"),
    )
    async with loaded(tmp_path / "g", text, silent=silent, count=count, add=ADD) as graph:
        assert texts(await graph.infer(ask({"in": np.array([1])}))) == {"out": "1"}


async def test_failed_call_does_not_affect_the_next(tmp_path: Path) -> None:
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("out", b"%d" % (10 // int(bytes(inputs[0]))))]
    """
    async with loaded(tmp_path / "g", graph_text(python_node("divide.py")), divide=source) as graph:
        assert texts(await graph.infer(ask({"in": b"5"}))) == {"out": "2"}
        with pytest.raises(GraphFailure, match=r"ZeroDivisionError: .* \(divide\.py:5\)"):
            await graph.infer(ask({"in": b"0"}))
        assert texts(await graph.infer(ask({"in": b"2"}))) == {"out": "5"}


async def test_first_value_of_a_generator_is_the_response(tmp_path: Path) -> None:
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            for number in range(3):
                yield [Tensor("out", b"%d" % number)]
    """
    async with loaded(tmp_path / "g", graph_text(python_node("three.py", more=LOOPBACK)), three=source) as graph:
        assert texts(await graph.infer(ask({"in": b""}))) == {"out": "0"}


async def test_model_is_shared_and_storage_is_not(tmp_path: Path) -> None:
    source = """
    from pyovms import current_context
    class OvmsPythonModel:
        opened = closed = 0
        def open(self, context):
            self.opened += 1
            context.storage.seen = 0
        def execute(self, inputs):
            storage = current_context().storage
            storage.seen += 1
            context = current_context()
            numbers = self.opened, self.closed, storage.seen, context.parameters["tokens"]
            return [Tensor("out", f"{context.request_id} {numbers} {context.is_cancelled()}".encode())]
        def close(self, context):
            self.closed += context.storage.seen
    """
    async with loaded(tmp_path / "g", graph_text(python_node("state.py")), state=source) as graph:
        requests = [ask({"in": b""}, parameters={"tokens": 7}, id=f"r{number}") for number in range(3)]
        answers = [texts(await graph.infer(request))["out"] for request in requests]
    assert answers == ["r0 (1, 0, 1, 7) False", "r1 (2, 1, 1, 7) False", "r2 (3, 2, 1, 7) False"]


async def test_metadata_has_streams_in_order_without_types(tmp_path: Path) -> None:
    text = graph_text(
        python_node("add.py", ["A:b", "B:a"], name="n1"), inputs=["OVMS_PY_TENSOR_B:b", "OVMS_PY_TENSOR_A:a"]
    )
    async with loaded(tmp_path / "g", text, add=ADD) as graph:
        known = graph.metadata
    inputs = [(spec.name, spec.datatype.name, spec.shape) for spec in known.inputs]
    assert inputs == [("a", "INVALID", ()), ("b", "INVALID", ())]
    assert [spec.name for spec in known.outputs] == ["out"]


async def test_all_packets_are_returned_up_to_a_size(tmp_path: Path) -> None:
    endless = """
class OvmsPythonModel:
    def execute(self, inputs):
        count = int(np.array(inputs[0])[0])
        for number in range(count) if count else iter(int, 1):
            yield [Tensor("out", np.array([number]))]
"""
    text = graph_text(python_node("endless.py", more=LOOPBACK))
    async with loaded(tmp_path / "g", text, endless="import numpy as np\n" + endless) as graph:
        for count, sizes in ((3, [0, 1, 2]), (1, [0])):
            request = ask({"in": np.array([count])})
            request.wants_all_packets, request.most_bytes = True, 80
            response = await graph.infer(request)
            assert [int.from_bytes(each.data, "little") for each in response.outputs if hasattr(each, "data")] == sizes
        request = ask({"in": np.array([0])})
        request.wants_all_packets, request.most_bytes = True, 80
        with pytest.raises(PayloadTooLarge, match="the outputs have 88 bytes, the limit is 80"):
            await graph.infer(request)
        assert len((await graph.infer(ask({"in": np.array([5])}))).outputs) == 1
