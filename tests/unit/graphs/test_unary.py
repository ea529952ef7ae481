"""Unary calls of graphs, without any wire: chains, branches, data types, missing inputs and outputs, failures."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import GraphFailure, InvalidRequest, PayloadTooLarge
from ovmstrio.core.request import Contents, InferInput, InferRequest
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


def array_of(response: InferResponse, name: str = "out") -> np.ndarray[Any, Any]:
    """Give an output as the array that its datatype and shape say it is."""
    (output,) = (each for each in response.outputs if each.name == name)
    assert isinstance(output, RawTensor)
    return np.frombuffer(output.data, BY_NAME[output.datatype].numpy).reshape(output.shape)


def typed(datatype: str, array: np.ndarray[Any, Any]) -> InferRequest:
    """Make a request with raw content."""
    return InferRequest(GRAPH, inputs=[InferInput("in", datatype, array.shape)], raw_inputs=[array.tobytes()])


@pytest.mark.parametrize("form", ["{name}", "{tag}:{name}", "{tag}:0:{name}"])
async def test_three_nodes_in_a_chain_add_up(tmp_path: Path, form: str) -> None:
    """Streams without tags, with tags, and with tags and indexes mean the same."""
    streams = ["in", "second", "third", "out"]
    nodes = [
        python_node("add.py", [form.format(tag="A", name=a)], [form.format(tag="B", name=b)], name=f"n{number}")
        for number, (a, b) in enumerate(itertools.pairwise(streams), start=1)
    ]
    async with loaded(tmp_path / "g", graph_text(*nodes), add=ADD) as graph:
        response = await graph.infer(ask({"in": np.array([1, 2, 3])}))
    assert array_of(response).tolist() == [7, 8, 9]


@pytest.mark.parametrize("datatype", NUMBERS)
async def test_each_datatype_keeps_its_type(tmp_path: Path, datatype: str) -> None:
    """What a handler computes in a type leaves in that type."""
    array = np.array([[1, 2], [3, 4]], BY_NAME[datatype].numpy)
    async with loaded(tmp_path / "g", graph_text(python_node("add.py", name="n1")), add=ADD) as graph:
        response = await graph.infer(typed(datatype, array))
    (output,) = response.outputs
    assert isinstance(output, RawTensor)
    assert output.datatype == datatype
    assert array_of(response).tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
async def test_scalars_and_empty_tensors_go_round(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A shape without dimensions and one with a dimension of 0 are shapes like others."""
    async with loaded(tmp_path / "g", graph_text(python_node("add.py", name="n1")), add=ADD) as graph:
        response = await graph.infer(typed("FP32", np.zeros(shape, np.float32)))
    assert array_of(response).shape == shape
    assert array_of(response).tolist() == np.ones(shape, np.float32).tolist()


async def test_values_that_come_one_by_one_are_read(tmp_path: Path) -> None:
    """Typed contents are as good as raw ones."""
    given = InferInput("in", "INT32", (3,), Contents("int_contents", [1, 2, 3]))
    async with loaded(tmp_path / "g", graph_text(python_node("add.py", name="n1")), add=ADD) as graph:
        response = await graph.infer(InferRequest(GRAPH, inputs=[given]))
    assert array_of(response).tolist() == [2, 3, 4]


async def test_one_input_feeds_two_nodes(tmp_path: Path) -> None:
    """Both outputs come in one response, in the order of the graph's declaration."""
    nodes = [python_node("add.py", outputs=[f"OUT:out{n}"], name=f"n{n}") for n in (1, 2)]
    outputs = ["OVMS_PY_TENSOR_B:out2", "OVMS_PY_TENSOR_A:out1"]
    async with loaded(tmp_path / "g", graph_text(*nodes, outputs=outputs), add=ADD) as graph:
        response = await graph.infer(ask({"in": np.array([5])}, id="mine"))
    assert [output.name for output in response.outputs] == ["out2", "out1"]
    assert [array_of(response, name).tolist() for name in ("out1", "out2")] == [[6], [7]]
    assert (response.id, response.model_name, response.model_version) == ("mine", "graph", "1")
    assert isinstance(response.parameters["OVMS_MP_TIMESTAMP"], int)


async def test_inputs_come_in_the_order_of_tags(tmp_path: Path) -> None:
    """Neither the order of the file nor that of the request counts."""
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


async def test_a_custom_datatype_passes_through(tmp_path: Path) -> None:
    """Neither its name nor its shape is judged, and numpy's own names come back."""
    source = """
    import numpy as np
    class OvmsPythonModel:
        def execute(self, inputs):
            assert (inputs[0].datatype, inputs[0].shape, inputs[0].data.shape) == ("my_string", (3,), (23,))
            words = np.array(["some", "longtexts"])
            return [Tensor("out", words)]
    """
    async with loaded(tmp_path / "g", graph_text(python_node("custom.py")), custom=source) as graph:
        given = InferInput("in", "my_string", (3,))
        response = await graph.infer(InferRequest(GRAPH, inputs=[given], raw_inputs=[b"null0terminated0string0"]))
    (output,) = response.outputs
    assert isinstance(output, RawTensor)
    assert (output.datatype, output.shape) == ("9w", (2,))
    assert np.frombuffer(output.data, "<U9").tolist() == ["some", "longtexts"]


async def test_parts_of_arrays_leave_in_the_order_of_their_elements(tmp_path: Path) -> None:
    """A transposed array or a slice is written as it reads."""
    source = """
    import numpy as np
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("out", np.arange(12, dtype="int32").reshape(3, 4).T[::2])]
    """
    async with loaded(tmp_path / "g", graph_text(python_node("part.py")), part=source) as graph:
        response = await graph.infer(ask({"in": b""}))
    assert array_of(response).tolist() == [[0, 4, 8], [2, 6, 10]]


async def test_all_inputs_are_needed(tmp_path: Path) -> None:
    """A call with fewer is refused, naming those that are missing; a stranger is refused too."""
    node = python_node("add.py", ["A:in", "B:more"], name="n1")
    text = graph_text(node, inputs=["OVMS_PY_TENSOR_A:in", "OVMS_PY_TENSOR_B:more"])
    async with loaded(tmp_path / "g", text, add=ADD) as graph:
        with pytest.raises(
            InvalidRequest, match="Invalid number of inputs - Not all input packets created; missing: more"
        ):
            await graph.infer(ask({"in": np.array([1])}))
        with pytest.raises(InvalidRequest, match="Unexpected input - stranger is unexpected"):
            await graph.infer(ask({"in": np.array([1]), "stranger": b""}))
        with pytest.raises(InvalidRequest, match=r"Also: Invalid number of inputs .* missing: more"):
            await graph.infer(ask({"in": np.array([1]), "stranger": b""}))


async def test_an_output_that_gets_nothing_is_a_failure(tmp_path: Path) -> None:
    """A call is answered in full or not at all."""
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            return []
    """
    async with loaded(tmp_path / "g", graph_text(python_node("nothing.py")), nothing=source) as graph:
        with pytest.raises(GraphFailure, match='Unknown error during mediapipe execution: nothing came out of "out"'):
            await graph.infer(ask({"in": b"x"}))


async def test_a_node_behind_a_silent_one_runs_with_what_it_has(tmp_path: Path) -> None:
    """When the sources have ended, a node that waits for two inputs gets the one that came."""
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


async def test_a_failing_call_leaves_the_next_alone(tmp_path: Path) -> None:
    """Good, failing and good calls alternate on one loaded graph."""
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


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("def execute(self): return []", "TypeError"),
        ("def execute(self, inputs): return inputs.nothing", "AttributeError"),
        ("def execute(self, inputs): import no_such_module", "No module named 'no_such_module'"),
        ("def execute(self, inputs): return Tensor('out', b'')", "Expected: list or generator"),
        ("def execute(self, inputs): raise SystemExit(3)", "SystemExit"),
    ],
)
async def test_whatever_a_handler_does_wrong_is_told(tmp_path: Path, body: str, text: str) -> None:
    """Neither a wrong signature nor an attempt to exit harms more than the call."""
    source = f"class OvmsPythonModel:\n    {body}\n"
    async with loaded(tmp_path / "g", graph_text(python_node("bad.py")), bad=source) as graph:
        with pytest.raises(GraphFailure) as raised:
            await graph.infer(ask({"in": b""}))
    assert 'node "node" failed: Error occurred during graph execution' in str(raised.value)
    assert text in str(raised.value)


async def test_a_generator_answers_a_call_with_its_first_values(tmp_path: Path) -> None:
    """With LOOPBACK, a call of a generative node gets the first set."""
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            for number in range(3):
                yield [Tensor("out", b"%d" % number)]
    """
    async with loaded(tmp_path / "g", graph_text(python_node("three.py", more=LOOPBACK)), three=source) as graph:
        assert texts(await graph.infer(ask({"in": b""}))) == {"out": "0"}


async def test_a_list_from_a_node_with_loopback_is_an_ordinary_answer(tmp_path: Path) -> None:
    """Returning instead of yielding works as in regular mode, any number of times."""
    node = python_node("add.py", name="n1", more=LOOPBACK)
    async with loaded(tmp_path / "g", graph_text(node), add=ADD) as graph:
        for number in (1, 5):
            assert array_of(await graph.infer(ask({"in": np.array([number])}))).tolist() == [number + 1]


async def test_async_handlers_run_too(tmp_path: Path) -> None:
    """``async def execute`` is awaited on trio, and an async generator is iterated."""
    once = """
    import trio
    class OvmsPythonModel:
        async def execute(self, inputs):
            await trio.sleep(0)
            return [Tensor("out", bytes(inputs[0]) * 2)]
    """
    many = """
    import trio
    class OvmsPythonModel:
        async def execute(self, inputs):
            for number in range(3):
                await trio.sleep(0)
                yield [Tensor("out", b"%d" % number)]
    """
    async with loaded(tmp_path / "a", graph_text(python_node("once.py")), once=once) as graph:
        assert texts(await graph.infer(ask({"in": b"ab"}))) == {"out": "abab"}
    async with loaded(tmp_path / "b", graph_text(python_node("many.py", more=LOOPBACK)), many=many) as graph:
        assert texts(await graph.infer(ask({"in": b""}))) == {"out": "0"}


async def test_state_lives_as_long_as_its_owner(tmp_path: Path) -> None:
    """Members of the model are shared by all calls, the context's storage by none; open and close come in pairs."""
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
            return [Tensor("out", b"%d %d %d" % (self.opened, self.closed, storage.seen))]
        def close(self, context):
            self.closed += context.storage.seen
    """
    async with loaded(tmp_path / "g", graph_text(python_node("state.py")), state=source) as graph:
        answers = [texts(await graph.infer(ask({"in": b""})))["out"] for _ in range(3)]
    assert answers == ["1 0 1", "2 1 1", "3 2 1"]


async def test_the_context_tells_of_the_request(tmp_path: Path) -> None:
    """Parameters and id reach the handler."""
    source = """
    from pyovms import current_context
    class OvmsPythonModel:
        def execute(self, inputs):
            context = current_context()
            said = f"{context.request_id} {context.parameters['tokens']} {context.is_cancelled()}"
            return [Tensor("out", said.encode())]
    """
    async with loaded(tmp_path / "g", graph_text(python_node("tell.py")), tell=source) as graph:
        response = await graph.infer(ask({"in": b""}, parameters={"tokens": 7}, id="r1"))
    assert texts(response) == {"out": "r1 7 False"}


async def test_metadata_names_streams_in_order(tmp_path: Path) -> None:
    """A graph says nothing of types and shapes."""
    text = graph_text(
        python_node("add.py", ["A:b", "B:a"], name="n1"), inputs=["OVMS_PY_TENSOR_B:b", "OVMS_PY_TENSOR_A:a"]
    )
    async with loaded(tmp_path / "g", text, add=ADD) as graph:
        known = graph.metadata
    assert [(spec.name, spec.datatype.name, spec.shape) for spec in known.inputs] == [
        ("a", "INVALID", ()),
        ("b", "INVALID", ()),
    ]
    assert [spec.name for spec in known.outputs] == ["out"]


async def test_a_call_may_want_every_packet_as_far_as_an_answer_may_be_large(tmp_path: Path) -> None:
    """An endless generator ends when all together would be too large, and the next call is served."""
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
