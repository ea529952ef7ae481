"""Streams to graphs, without any wire: order, timestamps, problems of single requests, failures, cancellation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import FailedPrecondition, GraphFailure
from ovmstrio.runtimes.graphs.timestamps import MAX, MIN
from tests.support.graphs import LOOPBACK, ask, graph_text, loaded, python_node, stamps, stream, texts
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.runtimes.graphs.graph_servable import GraphServable

ECHO = """
class OvmsPythonModel:
    def initialize(self, kwargs):
        self.name = [n for n in kwargs["output_names"] if n != "loopback"][0]
    def execute(self, inputs):
        return [Tensor(self.name, bytes(inputs[0]))]
"""

UPPER_ALL = """
class OvmsPythonModel:
    def execute(self, inputs):
        return [Tensor("out" + each.name[-1], bytes(each).upper()) for each in inputs]
"""

THREE = """
class OvmsPythonModel:
    def execute(self, inputs):
        for number in range(3):
            yield [Tensor("out", bytes(inputs[0]) + b"%d" % number)]
"""

TEXT = graph_text(python_node("handler.py"))
GENERATIVE = graph_text(python_node("handler.py", more=LOOPBACK))


async def test_automatic_timestamps_ascend(tmp_path: Path) -> None:
    """Three requests give three replies in order, each later than the one before."""
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, *(ask({"in": text}) for text in (b"a", b"b", b"c")))
    assert [text for _, _, text in answers.outputs] == ["a", "b", "c"]
    assert stamps(answers) == sorted(set(stamps(answers)))
    assert answers.failure is None


async def test_manual_timestamps_come_back(tmp_path: Path) -> None:
    """Each reply has the timestamp of its request, which need not be consecutive."""
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, *(ask({"in": b"x"}, stamp) for stamp in (3, 12, 99)))
    assert stamps(answers) == [3, 12, 99]


@pytest.mark.parametrize("timestamp", [MIN, MAX])
async def test_the_smallest_and_largest_timestamps_are_legal(tmp_path: Path, timestamp: int) -> None:
    """Everything between the special values may be used."""
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, timestamp))
    assert stamps(answers) == [timestamp]
    assert answers.problems == []


@pytest.mark.parametrize(
    ("timestamp", "text"),
    [
        ("7", "Invalid timestamp format in request parameter OVMS_MP_TIMESTAMP. Should be int64"),
        (MIN - 1, "Timestamp::PreStream()"),
        (MIN - 3, "Timestamp::Unset()"),
        (MAX + 1, "Timestamp::PostStream()"),
        (MAX + 3, "Timestamp::Done()"),
    ],
)
async def test_a_timestamp_that_is_none_spoils_its_request_alone(
    tmp_path: Path, timestamp: int | str, text: str
) -> None:
    """The problem is told, and the stream goes on."""
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, timestamp), ask({"in": b"y"}, 5))
    expected = f"Malformed packet timestamp - {text}; partial deserialization of first request"
    assert answers.problems == [expected]
    assert answers.outputs == [(5, "out", "y")]
    assert answers.failure is None


async def test_a_timestamp_that_goes_back_ends_the_stream(tmp_path: Path) -> None:
    """What was right before is answered, and the failure names the stream and both timestamps."""
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, 3), ask({"in": b"x"}, 2), wait_each=1)
    assert stamps(answers) == [3]
    assert answers.problems == []
    assert isinstance(answers.failure, GraphFailure)
    assert str(answers.failure).startswith("Mediapipe execution failed. MP status - INVALID_ARGUMENT: ")
    assert 'stream "in". Current minimum expected timestamp is 4 but received 2' in str(answers.failure)


async def test_a_generator_answers_at_ascending_timestamps(tmp_path: Path) -> None:
    """The values of one request leave at T, T+1, T+2."""
    async with loaded(tmp_path / "g", GENERATIVE, handler=THREE) as graph:
        answers = await stream(graph, ask({"in": b"v"}, 64))
    assert answers.outputs == [(64, "out", "v0"), (65, "out", "v1"), (66, "out", "v2")]
    assert answers.failure is None


async def test_several_generations_run_on_one_stream(tmp_path: Path) -> None:
    """A request that comes during a generation waits for its end, with automatic timestamps too."""
    async with loaded(tmp_path / "g", GENERATIVE, handler=THREE) as graph:
        manual = await stream(graph, ask({"in": b"a"}, 1), ask({"in": b"b"}, 100))
        automatic = await stream(graph, ask({"in": b"a"}), ask({"in": b"b"}), wait_each=3)
    expected = ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert [text for _, _, text in manual.outputs] == expected
    assert [text for _, _, text in automatic.outputs] == expected
    assert stamps(automatic) == sorted(set(stamps(automatic)))


async def test_a_request_into_a_running_generation_fails_the_stream(tmp_path: Path) -> None:
    """A manual timestamp before the generation's next one is refused in OVMS's words."""
    endless = """
    class OvmsPythonModel:
        def execute(self, inputs):
            number = 0
            while True:
                number += 1
                yield [Tensor("out", b"%d" % number)]
    """
    async with loaded(tmp_path / "g", GENERATIVE, handler=endless) as graph:
        failure = await _request_into(graph)
    text = 'RESOURCE_EXHAUSTED: CalculatorGraph::Run() failed: \nCalculator::Process() for node "node" failed: '
    assert text + "Node is already processing data. Create new stream for another request." in str(failure)


async def _request_into(graph: GraphServable) -> Exception | None:
    """Send a second request as soon as the first has been answered once."""
    try:
        async with graph.open_stream(ask({"in": b"x"}, 10)) as opened:
            await opened.replies.receive()
            with trio.fail_after(WAIT_SECONDS):
                await opened.send(ask({"in": b"x"}, 11))
                async for _ in opened.replies:
                    pass
    except GraphFailure as error:
        return error
    return None


@pytest.mark.parametrize("together", [True, False])
async def test_inputs_with_one_timestamp_meet_in_one_call(tmp_path: Path, together: bool) -> None:
    """Two inputs, in one request or in two, give three values on two outputs at the same timestamps."""
    two = """
    class OvmsPythonModel:
        def execute(self, inputs):
            for number in range(3):
                yield [Tensor("out1", bytes(inputs[0])), Tensor("out2", bytes(inputs[1]))]
    """
    node = python_node("handler.py", ["A:in1", "B:in2"], ["A:out1", "B:out2"], more=LOOPBACK)
    text = graph_text(
        node,
        inputs=["OVMS_PY_TENSOR1:in1", "OVMS_PY_TENSOR2:in2"],
        outputs=["OVMS_PY_TENSOR1:out1", "OVMS_PY_TENSOR2:out2"],
    )
    requests = [ask({"in1": b"a", "in2": b"b"}, 64)] if together else [ask({"in1": b"a"}, 64), ask({"in2": b"b"}, 64)]
    async with loaded(tmp_path / "g", text, handler=two) as graph:
        answers = await stream(graph, *requests)
    assert answers.outputs == [
        (stamp, name, text) for stamp in (64, 65, 66) for name, text in (("out1", "a"), ("out2", "b"))
    ]


async def test_independent_streams_share_a_timestamp_over_several_requests(tmp_path: Path) -> None:
    """Each node answers for its own input."""
    nodes = [python_node("handler.py", [f"IN:in{n}"], [f"OUT:out{n}"], name=f"n{n}") for n in (1, 2, 3)]
    text = graph_text(
        *nodes,
        inputs=[f"OVMS_PY_TENSOR{n}:in{n}" for n in (1, 2, 3)],
        outputs=[f"OVMS_PY_TENSOR{n}:out{n}" for n in (1, 2, 3)],
    )
    async with loaded(tmp_path / "g", text, handler=ECHO) as graph:
        apart = await stream(graph, *(ask({f"in{n}": b"%d" % n}, 64) for n in (1, 2, 3)))
        together = await stream(graph, ask({f"in{n}": b"%d" % n for n in (1, 2, 3)}, 64))
    expected = [(64, f"out{n}", str(n)) for n in (1, 2, 3)]
    assert sorted(apart.outputs) == sorted(together.outputs) == expected


async def test_the_immediate_policy_runs_on_each_input(tmp_path: Path) -> None:
    """Single inputs give their own outputs, and the end of the stream gives nothing more."""
    node = python_node(
        "handler.py",
        ["A:in1", "B:in2"],
        ["A:out1", "B:out2"],
        more='input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler" }',
    )
    text = graph_text(
        node,
        inputs=["OVMS_PY_TENSOR1:in1", "OVMS_PY_TENSOR2:in2"],
        outputs=["OVMS_PY_TENSOR1:out1", "OVMS_PY_TENSOR2:out2"],
    )
    async with loaded(tmp_path / "g", text, handler=UPPER_ALL) as graph:
        answers = await stream(graph, ask({"in1": b"a"}), ask({"in2": b"b"}), ask({"in1": b"c"}))
    assert [(name, value) for _, name, value in answers.outputs] == [("out1", "A"), ("out2", "B"), ("out1", "C")]
    assert answers.failure is None


async def test_labels_come_once_and_images_after_them(tmp_path: Path) -> None:
    """The requirement's handler as it stands: with labels alone ``execute`` falls off its end, and nothing is sent."""
    handler = """
    class OvmsPythonModel:
        def initialize(self, kwargs):
            self.labels = []

        def execute(self, inputs):
            for input in inputs:
                if input.name == "labels":
                    self.labels = bytes(input).split()
                else:
                    return [Tensor("result", self.labels[bytes(input)[0]])]
    """
    node = python_node(
        "handler.py",
        ["INPUT1:labels", "INPUT2:image"],
        ["OUTPUT:result"],
        more='input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler" }',
    )
    text = graph_text(
        node, inputs=["OVMS_PY_TENSOR1:labels", "OVMS_PY_TENSOR2:image"], outputs=["OVMS_PY_TENSOR:result"]
    )
    async with loaded(tmp_path / "g", text, handler=handler) as graph:
        answers = await stream(graph, ask({"labels": b"cat dog"}), ask({"image": b"\x01"}), ask({"image": b"\x00"}))
    assert [(name, value) for _, name, value in answers.outputs] == [("result", "dog"), ("result", "cat")]
    assert answers.failure is None


async def test_requests_that_are_wrong_in_themselves_leave_the_stream_open(tmp_path: Path) -> None:
    """Wrong sizes, names and addressees are told one by one, and good requests between them are served."""
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        short = ask({"in": np.zeros(4, np.float32)})
        short.raw_inputs[0] = bytes(3)
        answers = await stream(
            graph,
            short,
            ask({"in": b"one"}),
            ask({"stranger": b"x"}),
            ask({"in": b"two"}, model="another"),
            ask({"in": b"three"}, model_version="7"),
            ask({"in": b"four"}, model_version="1"),
        )
    first, unexpected, name, version = answers.problems
    assert first.startswith("Invalid content size of tensor proto - Invalid Python tensor buffer size.")
    assert first.endswith("; partial deserialization of first request")
    assert unexpected == "Unexpected input - stranger is unexpected; partial deserialization of subsequent requests"
    assert name == "Subsequent request with incorrect servable name; validate subsequent requests"
    assert version == "Subsequent request with incorrect servable version; validate subsequent requests"
    assert [text for _, _, text in answers.outputs] == ["one", "four"]
    assert answers.failure is None


async def test_a_stream_without_inputs_ends_well(tmp_path: Path) -> None:
    """A request may bring no input at all."""
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask())
    assert answers.outputs == []
    assert answers.problems == []
    assert answers.failure is None


async def test_replies_name_graph_and_version_and_have_no_id(tmp_path: Path) -> None:
    """A stream never echoes request ids."""
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, id="first"), ask({"in": b"y"}, id="second"))
    assert {(reply.model_name, reply.model_version, reply.id) for reply in answers.replies} == {("graph", "1", "")}
    assert len(answers.replies) == 2


async def test_the_reserved_side_packet_is_refused(tmp_path: Path) -> None:
    """A parameter named py cannot stand for the node's resources."""
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, parameters={"py": "mine"}))
    assert isinstance(answers.failure, FailedPrecondition)
    assert "py is special reserved name" in str(answers.failure)
    assert answers.replies == []


async def test_a_side_packet_that_nobody_gave_keeps_the_run_from_starting(tmp_path: Path) -> None:
    """The resources of Python nodes have one name only, and no other is provided."""
    text = TEXT.replace("PYTHON_NODE_RESOURCES:py", "PYTHON_NODE_RESOURCES:foo")
    async with loaded(tmp_path / "g", text, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}))
    assert isinstance(answers.failure, FailedPrecondition)
    assert 'Failed to start mediapipe graph - Side packet "foo" is required but was not provided.' in str(
        answers.failure
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError('no such thing')", "ValueError: no such thing (handler.py:5)"),
        ("return 7", "Expected: list or generator"),
        ("return [1]", "int"),
        ("return [Tensor('other', b'')]", "other is not a valid node output"),
        ("yield [Tensor('out', b'')]", "Execute yielded, but LOOPBACK is not defined in the node"),
    ],
)
async def test_a_failing_node_ends_the_stream_at_once(tmp_path: Path, body: str, text: str) -> None:
    """The failure comes while the client is silent, names the node and carries the cause."""
    source = f"""
class OvmsPythonModel:
    def execute(self, inputs):
        {body}
"""
    async with loaded(tmp_path / "g", TEXT, handler=source) as graph:
        with trio.fail_after(WAIT_SECONDS), pytest.raises(GraphFailure) as raised:
            async with graph.open_stream(ask({"in": b"x"})) as opened:
                assert [reply async for reply in opened.replies] == []
    message = str(raised.value)
    prefix = "Mediapipe execution failed. MP status - INTERNAL: CalculatorGraph::Run() failed: \n"
    assert message.startswith(
        f'{prefix}Calculator::Process() for node "node" failed: Error occurred during graph execution'
    )
    assert text in message


async def test_what_was_yielded_before_a_failure_arrives(tmp_path: Path) -> None:
    """A value is on its way before the next one is computed."""
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            yield [Tensor("out", b"kept")]
            raise RuntimeError("later")
    """
    async with loaded(tmp_path / "g", GENERATIVE, handler=source) as graph:
        answers = await stream(graph, ask({"in": b"x"}, 5))
    assert answers.outputs == [(5, "out", "kept")]
    assert "RuntimeError: later" in str(answers.failure)


async def test_a_value_leaves_before_the_next_is_computed(tmp_path: Path) -> None:
    """The first output arrives while the generator still works on the second."""
    source = """
    import threading
    gate = threading.Event()
    class OvmsPythonModel:
        def execute(self, inputs):
            yield [Tensor("out", b"first")]
            assert gate.wait(60)
            yield [Tensor("out", b"second")]
        def initialize(self, kwargs):
            type(self).gate = gate
    """
    release = """
    import gc
    class OvmsPythonModel:
        def execute(self, inputs):
            for each in gc.get_objects():
                if type(each).__name__ == "OvmsPythonModel" and hasattr(type(each), "gate"):
                    type(each).gate.set()
            return [Tensor("out", b"released")]
    """
    async with (
        loaded(tmp_path / "g", GENERATIVE, handler=source) as graph,
        loaded(tmp_path / "h", TEXT, handler=release) as other,
        graph.open_stream(ask({"in": b"x"})) as opened,
    ):
        with trio.fail_after(WAIT_SECONDS):
            first = await opened.replies.receive()
            assert texts(await other.infer(ask({"in": b""}))) == {"out": "released"}
            second = await opened.replies.receive()
        opened.end()
        async for _ in opened.replies:
            pass
    assert [texts(reply)["out"] for reply in (first, second)] == ["first", "second"]  # type: ignore[arg-type]


async def test_leaving_a_stream_stops_its_generator(tmp_path: Path) -> None:
    """The generator is closed within a step, and the next stream is served."""
    source = """
    from pyovms import current_context
    class OvmsPythonModel:
        closed = 0
        def execute(self, inputs):
            if bytes(inputs[0]) == b"ask":
                yield [Tensor("out", b"%d" % self.closed)]
                return
            try:
                while True:
                    yield [Tensor("out", b"more")]
            finally:
                self.closed += 1
    """
    async with loaded(tmp_path / "g", GENERATIVE, handler=source) as graph:
        for _ in range(3):
            with trio.CancelScope() as scope:
                async with graph.open_stream(ask({"in": b"x"})) as opened:
                    await opened.replies.receive()
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
        answers = await stream(graph, ask({"in": b"ask"}))
    assert [text for _, _, text in answers.outputs] == ["3"]


async def test_a_client_that_does_not_read_stops_the_generator(tmp_path: Path) -> None:
    """Only so much is computed ahead of the replies that are taken."""
    source = """
    class OvmsPythonModel:
        computed = 0
        def execute(self, inputs):
            if bytes(inputs[0]) == b"ask":
                yield [Tensor("out", b"%d" % self.computed)]
                return
            for number in range(100_000):
                self.computed += 1
                yield [Tensor("out", b"%d" % number)]
    """
    async with loaded(tmp_path / "g", GENERATIVE, handler=source) as graph, trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with graph.open_stream(ask({"in": b"x"})):
                computed = [0]
                while computed[-1] == 0 or computed[-1] != computed[-2]:
                    await trio.testing.wait_all_tasks_blocked(0.2)
                    answers = await stream(graph, ask({"in": b"ask"}))
                    computed.append(int(answers.outputs[0][2]))
                scope.cancel()
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert 1 <= computed[-1] <= 200


async def test_an_open_stream_has_a_deadline(tmp_path: Path) -> None:
    """What a handler is told of the deadline is what the caller gave."""
    source = """
    from pyovms import current_context
    class OvmsPythonModel:
        def execute(self, inputs):
            left = current_context().remaining()
            return [Tensor("out", b"none" if left is None else b"%d" % round(left, -4))]
    """
    async with loaded(tmp_path / "g", TEXT, handler=source) as graph:
        without = await stream(graph, ask({"in": b"x"}, deadline=math.inf))
        within = await stream(graph, ask({"in": b"x"}, deadline=trio.current_time() + 1e6))
    assert [text for _, _, text in without.outputs + within.outputs] == ["none", "1000000"]
