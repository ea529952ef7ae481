from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import FailedPrecondition, GraphFailure, InvalidRequest, PayloadTooLarge
from ovmstrio.core.request import InferRequest, InferResponse, RequestedOutput
from ovmstrio.core.tensor import BY_NAME, RawTensor
from ovmstrio.graphs.instance import ResponseSink
from ovmstrio.graphs.packets import MAX, MIN
from tests.support.graphs import LOOPBACK, ask, graph_text, handler, loaded, python_node, stamps, stream, texts
from tests.support.waits import WAIT_SECONDS, until_async

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ovmstrio.core.request import StreamReply
    from ovmstrio.core.service import InferStream
    from ovmstrio.graphs.servable import GraphServable

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
ECHO = "return [Tensor('out', bytes(inputs[0]))]"
THREE = "for number in range(3):\n    yield [Tensor('out', bytes(inputs[0]) + b'%d' % number)]"


def serving(
    folder: Path, body: str, *, more: str = "", prefix: str = "", head: str = ""
) -> AbstractAsyncContextManager[GraphServable]:
    text = graph_text(python_node("handler.py", more=more))
    return loaded(folder / "g", text, handler=handler(body, prefix=prefix, head=head))


def numbered(*nodes: str, count: int) -> str:
    """Write a graph whose inputs are ``in1``, ``in2``, ... and whose outputs are ``out1``, ``out2``, ..."""
    numbers = range(1, count + 1)
    inputs, outputs = [[f"OVMS_PY_TENSOR{n}:{side}{n}" for n in numbers] for side in ("in", "out")]
    return graph_text(*nodes, inputs=inputs, outputs=outputs)


def output_array(response: InferResponse, name: str = "out") -> np.ndarray[Any, Any]:
    (output,) = (each for each in response.outputs if each.name == name)
    assert isinstance(output, RawTensor)
    return np.frombuffer(output.data, BY_NAME[output.datatype].numpy).reshape(output.shape)


# Calls


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


async def test_outputs_have_the_order_of_the_graph(tmp_path: Path) -> None:
    nodes = [python_node("add.py", outputs=[f"OUT:out{n}"], name=f"n{n}") for n in (1, 2)]
    outputs = ["OVMS_PY_TENSOR_B:out2", "OVMS_PY_TENSOR_A:out1"]
    async with loaded(tmp_path / "g", graph_text(*nodes, outputs=outputs), add=ADD) as graph:
        response = await graph.infer(ask({"in": np.array([5])}, id="mine"))
    assert [output.name for output in response.outputs] == ["out2", "out1"]
    assert [output_array(response, name).tolist() for name in ("out1", "out2")] == [[6], [7]]
    assert (response.id, response.model_name, response.model_version) == ("mine", "graph", "1")
    assert isinstance(response.parameters["OVMS_MP_TIMESTAMP"], int)


async def test_a_requested_output_has_the_name_of_its_stream(tmp_path: Path) -> None:
    name = 'tag_to_output_tensor_names { key: "OVMS_PY_TENSOR" value: "own" }'
    options = f"[type.googleapis.com/mediapipe.PyTensorOvTensorConverterCalculatorOptions] {{ {name} }}"
    streams = 'input_stream: "OVTENSOR:in" output_stream: "OVMS_PY_TENSOR:out"'
    node = f'node {{ calculator: "PyTensorOvTensorConverterCalculator" {streams} node_options {{ {options} }} }}'
    async with loaded(tmp_path / "g", graph_text(node, inputs=["OVTENSOR:in"])) as graph:
        request = ask({"in": np.array([1, 2])})
        assert [output.name for output in (await graph.infer(request)).outputs] == ["own"]
        request.outputs = [RequestedOutput("out")]
        assert output_array(await graph.infer(request)).tolist() == [1, 2]


async def test_inputs_have_the_order_of_tags(tmp_path: Path) -> None:
    inputs = [f"OVMS_PY_TENSOR_{name.upper()}:{name}" for name in "cab"]
    text = graph_text(python_node("join.py", ["B:b", "A:a", "C:c"]), inputs=inputs)
    async with loaded(
        tmp_path / "g", text, join=handler("return [Tensor('out', b''.join(map(bytes, inputs)))]")
    ) as graph:
        response = await graph.infer(ask({"c": b"3", "a": b"1", "b": b"2"}))
        assert [spec.name for spec in graph.metadata.inputs] == ["a", "b", "c"]
    assert texts(response) == {"out": "123"}


async def test_missing_and_unknown_inputs_are_refused(tmp_path: Path) -> None:
    node = python_node("add.py", ["A:in", "B:more"], name="n1")
    text = graph_text(node, inputs=["OVMS_PY_TENSOR_A:in", "OVMS_PY_TENSOR_B:more"])
    missing = "Invalid number of inputs - Not all input packets created; missing: more"
    unknown = "Unexpected input - unknown is unexpected"
    async with loaded(tmp_path / "g", text, add=ADD) as graph:
        with pytest.raises(InvalidRequest, match=missing):
            await graph.infer(ask({"in": np.array([1])}))
        with pytest.raises(InvalidRequest, match=f"{unknown}.* Also: {missing}"):
            await graph.infer(ask({"in": np.array([1]), "unknown": b""}))


async def test_output_without_packet_is_a_failure(tmp_path: Path) -> None:
    async with serving(tmp_path, "return []") as graph:
        with pytest.raises(GraphFailure, match='Unknown error during mediapipe execution: nothing came out of "out"'):
            await graph.infer(ask({"in": b"x"}))


async def test_node_runs_without_the_input_of_a_silent_node(tmp_path: Path) -> None:
    text = graph_text(
        python_node("silent.py", outputs=["OUT:a"], name="silent"),
        python_node("add.py", outputs=["OUT:b"], name="n1"),
        python_node("count.py", ["A:a", "B:b"], name="count"),
    )
    sources: dict[str, Any] = {
        "silent": handler("return []"),
        "count": handler("return [Tensor('out', b'%d' % len(inputs))]"),
    }
    async with loaded(tmp_path / "g", text, add=ADD, **sources) as graph:
        assert texts(await graph.infer(ask({"in": np.array([1])}))) == {"out": "1"}


async def test_failed_call_does_not_affect_the_next(tmp_path: Path) -> None:
    async with serving(tmp_path, "return [Tensor('out', b'%d' % (10 // int(bytes(inputs[0]))))]") as graph:
        assert texts(await graph.infer(ask({"in": b"5"}))) == {"out": "2"}
        with pytest.raises(GraphFailure) as raised:
            await graph.infer(ask({"in": b"0"}))
        assert texts(await graph.infer(ask({"in": b"2"}))) == {"out": "5"}
    assert str(raised.value).startswith(
        "Mediapipe execution failed. MP status - INTERNAL: CalculatorGraph::Run() failed: \n"
        'Calculator::Process() for node "node" failed: Error occurred during graph execution: ZeroDivisionError: '
    )
    assert "(handler.py:5)" in str(raised.value)


async def test_first_value_of_a_generator_is_the_response(tmp_path: Path) -> None:
    async with serving(tmp_path, THREE, more=LOOPBACK) as graph:
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
            context = current_context()
            context.storage.seen += 1
            numbers = self.opened, self.closed, context.storage.seen, context.parameters["tokens"]
            return [Tensor("out", f"{context.request_id} {numbers} {context.is_cancelled()}".encode())]
        def close(self, context):
            self.closed += context.storage.seen
    """
    requests = [ask({"in": b""}, parameters={"tokens": 7}, id=f"r{number}") for number in range(3)]
    async with loaded(tmp_path / "g", graph_text(python_node("state.py")), state=source) as graph:
        answers = [texts(await graph.infer(request))["out"] for request in requests]
    assert answers == ["r0 (1, 0, 1, 7) False", "r1 (2, 1, 1, 7) False", "r2 (3, 2, 1, 7) False"]


async def test_all_packets_are_returned_up_to_a_size(tmp_path: Path) -> None:
    body = """
    count = int(np.array(inputs[0])[0])
    for number in range(count) if count else iter(int, 1):
        yield [Tensor("out", np.array([number]))]
    """

    def all_packets(count: int) -> InferRequest:
        request = ask({"in": np.array([count])})
        request.wants_all_packets, request.max_output_bytes = True, 80
        return request

    async with serving(tmp_path, body, more=LOOPBACK, head="import numpy as np") as graph:
        for count in (3, 1):
            response = await graph.infer(all_packets(count))
            values = [int.from_bytes(each.data, "little") for each in response.outputs if isinstance(each, RawTensor)]
            assert values == list(range(count))
        with pytest.raises(PayloadTooLarge, match="the outputs have 88 bytes, the limit is 80"):
            await graph.infer(all_packets(0))
        assert len((await graph.infer(ask({"in": np.array([5])}))).outputs) == 1


# Streams


async def test_automatic_timestamps_ascend(tmp_path: Path) -> None:
    async with serving(tmp_path, ECHO) as graph:
        answers = await stream(graph, *(ask({"in": text}, id="id") for text in (b"a", b"b", b"c")))
    assert [text for _, _, text in answers.outputs] == ["a", "b", "c"]
    assert stamps(answers) == sorted(set(stamps(answers)))
    assert answers.failure is None
    assert {(reply.model_name, reply.model_version, reply.id) for reply in answers.replies} == {("graph", "1", "id")}


async def test_replies_have_the_timestamps_of_their_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, ECHO) as graph:
        answers = await stream(graph, ask(), *(ask({"in": b"x"}, stamp) for stamp in (MIN, 3, 12, 99, MAX)))
    assert stamps(answers) == [MIN, 3, 12, 99, MAX]
    assert answers.problems == []
    assert answers.failure is None


@pytest.mark.parametrize(
    ("timestamp", "text"),
    [
        ("7", "Invalid timestamp format in request parameter OVMS_MP_TIMESTAMP. Should be int64"),
        (MIN - 1, "Timestamp::PreStream()"),
    ],
)
async def test_invalid_timestamp_fails_only_its_request(tmp_path: Path, timestamp: int | str, text: str) -> None:
    async with serving(tmp_path, ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, timestamp), ask({"in": b"y"}, 5))
    assert answers.problems == [f"Malformed packet timestamp - {text}; partial deserialization of first request"]
    assert answers.outputs == [(5, "out", "y")]
    assert answers.failure is None


async def test_descending_timestamp_ends_the_stream(tmp_path: Path) -> None:
    async with serving(tmp_path, ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, 3), ask({"in": b"x"}, 2), wait_each=1)
    assert stamps(answers) == [3]
    assert answers.problems == []
    assert isinstance(answers.failure, GraphFailure)
    assert str(answers.failure).startswith("Mediapipe execution failed. MP status - INVALID_ARGUMENT: ")
    assert 'stream "in". Current minimum expected timestamp is 4 but received 2' in str(answers.failure)


async def test_generations_of_one_stream_run_in_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, THREE, more=LOOPBACK) as graph:
        manual = await stream(graph, ask({"in": b"a"}, 1), ask({"in": b"b"}, 100))
        automatic = await stream(graph, ask({"in": b"a"}), ask({"in": b"b"}), wait_each=3)
    expected = ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert manual.outputs == list(zip([1, 2, 3, 100, 101, 102], ["out"] * 6, expected, strict=True))
    assert [text for _, _, text in automatic.outputs] == expected
    assert stamps(automatic) == sorted(set(stamps(automatic)))


async def test_request_during_a_generation_fails_the_stream(tmp_path: Path) -> None:
    async with serving(tmp_path, "while True:\n    yield [Tensor('out', b'x')]", more=LOOPBACK) as graph:
        with trio.fail_after(WAIT_SECONDS):
            answers = await stream(graph, ask({"in": b"x"}, 10), ask({"in": b"x"}, 11), wait_each=1)
    text = 'RESOURCE_EXHAUSTED: CalculatorGraph::Run() failed: \nCalculator::Process() for node "node" failed: '
    assert text + "Node is already processing data. Create new stream for another request." in str(answers.failure)


async def test_replies_have_the_ids_of_requests_with_descending_timestamps(tmp_path: Path) -> None:
    nodes = [python_node(f"n{n}.py", [f"A:in{n}"], [f"A:out{n}"], name=f"n{n}") for n in (1, 2)]
    sources: dict[str, Any] = {f"n{n}": handler(f"return [Tensor('out{n}', bytes(inputs[0]))]") for n in (1, 2)}
    requests = [ask({f"in{n}": b"x"}, stamp, id=f"r{stamp}") for n, stamp in ((1, 10), (2, 5), (1, 20), (2, 15))]
    async with loaded(tmp_path / "g", numbered(*nodes, count=2), **sources) as graph:
        answers = await stream(graph, *requests)
    assert sorted(stamps(answers)) == [5, 10, 15, 20]
    assert [reply.id for reply in answers.replies] == [f"r{stamp}" for stamp in stamps(answers)]


@pytest.mark.parametrize("together", [True, False])
async def test_inputs_of_one_timestamp_meet_in_one_call(tmp_path: Path, together: bool) -> None:
    body = "for _ in range(3):\n    yield [Tensor(f'out{n}', bytes(inputs[n - 1])) for n in (1, 2)]"
    text = numbered(python_node("handler.py", ["A:in1", "B:in2"], ["A:out1", "B:out2"], more=LOOPBACK), count=2)
    requests = [ask({"in1": b"a", "in2": b"b"}, 64)] if together else [ask({"in1": b"a"}, 64), ask({"in2": b"b"}, 64)]
    async with loaded(tmp_path / "g", text, handler=handler(body)) as graph:
        answers = await stream(graph, *requests)
    assert answers.outputs == [
        (stamp, name, text) for stamp in (64, 65, 66) for name, text in (("out1", "a"), ("out2", "b"))
    ]


async def test_invalid_requests_leave_the_stream_open(tmp_path: Path) -> None:
    short = ask({"in": np.zeros(4, np.float32)})
    short.raw_inputs[0] = bytes(3)
    async with serving(tmp_path, ECHO) as graph:
        answers = await stream(
            graph,
            short,
            ask({"in": b"one"}),
            ask({"unknown": b"x"}),
            ask({"in": b"two"}, model="another"),
            ask({"in": b"three"}, model_version="7"),
            ask({"in": b"four"}, model_version="1"),
        )
    first, *others = answers.problems
    assert first.startswith("Invalid content size of tensor proto - Invalid Python tensor buffer size.")
    assert first.endswith("; partial deserialization of first request")
    assert others == [
        "Unexpected input - unknown is unexpected; partial deserialization of subsequent requests",
        "Subsequent request with incorrect servable name; validate subsequent requests",
        "Subsequent request with incorrect servable version; validate subsequent requests",
    ]
    assert [text for _, _, text in answers.outputs] == ["one", "four"]
    assert answers.failure is None


async def test_missing_side_packet_fails_the_start(tmp_path: Path) -> None:
    text = graph_text(python_node("handler.py")).replace("PYTHON_NODE_RESOURCES:py", "PYTHON_NODE_RESOURCES:foo")
    async with loaded(tmp_path / "g", text, handler=handler(ECHO)) as graph:
        answers = await stream(graph, ask({"in": b"x"}))
    assert isinstance(answers.failure, FailedPrecondition)
    text = 'Failed to start mediapipe graph - Side packet "foo" is required but was not provided.'
    assert text in str(answers.failure)


async def test_generator_stops_while_the_client_does_not_read(tmp_path: Path) -> None:
    body = """
    if bytes(inputs[0]) == b"computed":
        yield [Tensor("out", b"%d" % self.computed)]
        return
    for self.computed in range(1, 100_000):
        yield [Tensor("out", b"x")]
    """
    async with serving(tmp_path, body, more=LOOPBACK) as graph:
        with trio.CancelScope() as scope:
            async with graph.open_stream(ask({"in": b"x"})):
                computed = [0, -1]
                while computed[-1] != computed[-2]:
                    await trio.testing.wait_all_tasks_blocked(0.2)
                    answers = await stream(graph, ask({"in": b"computed"}))
                    computed.append(int(answers.outputs[0][2]))
                scope.cancel()
                await trio.lowlevel.checkpoint()
    assert 1 <= computed[-1] <= 200


DUPLICATE = "return [Tensor('second', b'1'), Tensor('second', b'2')]"
"""The first packet makes its consumers runnable, the second one fails the graph before they run."""


@pytest.mark.parametrize("late", [{"model": "another"}, {"timestamp": "7"}, {"timestamp": 7}], ids=str)
async def test_request_and_end_after_a_failure_keep_the_replies(tmp_path: Path, late: dict[str, Any]) -> None:
    nodes = [
        python_node("add.py", name="n1"),
        python_node("twice.py", ["IN:in2"], ["OUT:second"], name="twice"),
        *(python_node("echo.py", ["IN:second"], [f"OUT:unused{n}"], name=f"reader{n}") for n in (1, 2)),
    ]
    text = graph_text(*nodes, inputs=["OVMS_PY_TENSOR_A:in", "OVMS_PY_TENSOR_B:in2"])
    replies: list[StreamReply] = []

    async def converse(graph: GraphServable) -> None:
        async with graph.open_stream(ask({"in": np.array([1])}, 1)) as opened:
            await until_async(lambda: opened.replies.statistics().current_buffer_used)
            await opened.send(ask({"in2": b""}, 2))
            await until_async(lambda: not opened.replies.statistics().open_send_channels)
            with pytest.raises(trio.BrokenResourceError):
                await opened.send(ask(**late))
            opened.end()
            replies.extend([reply async for reply in opened.replies])

    async with loaded(tmp_path / "g", text, add=ADD, twice=handler(DUPLICATE), echo=handler("return []")) as graph:
        with pytest.raises(GraphFailure, match="Packet timestamp mismatch"):
            await converse(graph)
    assert len(replies) == 1


async def test_replies_that_wait_for_the_client_precede_a_failure(tmp_path: Path) -> None:
    nodes = [
        python_node("flood.py", ["IN:in1"], ["OUT:out1"], name="flood", more=LOOPBACK),
        python_node("fail.py", ["IN:in2"], ["OUT:out2"], name="fail"),
    ]
    sources: dict[str, Any] = {
        "flood": handler("for number in range(1000):\n    yield [Tensor('out1', b'%d' % number)]"),
        "fail": handler("raise ValueError"),
    }
    produced, received = 0, list[str]()

    async def fail(opened: InferStream) -> None:
        for timestamp in itertools.count(2):
            await opened.send(ask({"in2": b""}, timestamp))

    async def converse(graph: GraphServable) -> None:
        nonlocal produced
        async with graph.open_stream(ask({"in1": b""}, 1)) as opened:
            await until_async(lambda: opened.replies.statistics().tasks_waiting_send)
            produced = opened.replies.statistics().current_buffer_used + 1
            with pytest.raises(trio.BrokenResourceError), trio.fail_after(WAIT_SECONDS):
                await fail(opened)
            async for reply in opened.replies:
                assert isinstance(reply, InferResponse)
                received.extend(texts(reply).values())

    async with loaded(tmp_path / "g", numbered(*nodes, count=2), **sources) as graph:
        with pytest.raises(GraphFailure, match="ValueError"):
            await converse(graph)
    assert received == list(map(str, range(produced)))


async def test_stream_ends_with_an_unexpected_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: ResponseSink) -> None:
        raise RuntimeError("a fault of the server")

    monkeypatch.setattr(ResponseSink, "end_requests", fail)
    async with serving(tmp_path, ECHO) as graph:
        answers = await stream(graph, ask({"in": b"a"}))
    assert "internal error; the server's log has the details" in str(answers.failure)
