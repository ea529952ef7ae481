from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import FailedPrecondition, GraphFailure
from ovmstrio.runtimes.graphs.timestamps import MAX, MIN
from tests.support.graphs import LOOPBACK, ask, graph_text, loaded, python_node, stamps, stream
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from pathlib import Path


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


def _numbered(*nodes: str, count: int) -> str:
    numbers = range(1, count + 1)
    inputs, outputs = [[f"OVMS_PY_TENSOR{n}:{side}{n}" for n in numbers] for side in ("in", "out")]
    return graph_text(*nodes, inputs=inputs, outputs=outputs)


async def test_automatic_timestamps_ascend(tmp_path: Path) -> None:
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, *(ask({"in": text}) for text in (b"a", b"b", b"c")))
    assert [text for _, _, text in answers.outputs] == ["a", "b", "c"]
    assert stamps(answers) == sorted(set(stamps(answers)))
    assert answers.failure is None


async def test_replies_have_the_timestamps_of_their_requests(tmp_path: Path) -> None:
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
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
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, timestamp), ask({"in": b"y"}, 5))
    expected = f"Malformed packet timestamp - {text}; partial deserialization of first request"
    assert answers.problems == [expected]
    assert answers.outputs == [(5, "out", "y")]
    assert answers.failure is None


async def test_descending_timestamp_ends_the_stream(tmp_path: Path) -> None:
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, 3), ask({"in": b"x"}, 2), wait_each=1)
    assert stamps(answers) == [3]
    assert answers.problems == []
    assert isinstance(answers.failure, GraphFailure)
    assert str(answers.failure).startswith("Mediapipe execution failed. MP status - INVALID_ARGUMENT: ")
    assert 'stream "in". Current minimum expected timestamp is 4 but received 2' in str(answers.failure)


async def test_generator_replies_at_ascending_timestamps(tmp_path: Path) -> None:
    async with loaded(tmp_path / "g", GENERATIVE, handler=THREE) as graph:
        answers = await stream(graph, ask({"in": b"v"}, 64))
    assert answers.outputs == [(64, "out", "v0"), (65, "out", "v1"), (66, "out", "v2")]
    assert answers.failure is None


async def test_generations_of_one_stream_run_in_turn(tmp_path: Path) -> None:
    async with loaded(tmp_path / "g", GENERATIVE, handler=THREE) as graph:
        manual = await stream(graph, ask({"in": b"a"}, 1), ask({"in": b"b"}, 100))
        automatic = await stream(graph, ask({"in": b"a"}), ask({"in": b"b"}), wait_each=3)
    expected = ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert [text for _, _, text in manual.outputs] == expected
    assert [text for _, _, text in automatic.outputs] == expected
    assert stamps(automatic) == sorted(set(stamps(automatic)))


async def test_request_during_a_generation_fails_the_stream(tmp_path: Path) -> None:
    endless = """
    class OvmsPythonModel:
        def execute(self, inputs):
            number = 0
            while True:
                number += 1
                yield [Tensor("out", b"%d" % number)]
    """
    async with loaded(tmp_path / "g", GENERATIVE, handler=endless) as graph:
        with trio.fail_after(WAIT_SECONDS):
            answers = await stream(graph, ask({"in": b"x"}, 10), ask({"in": b"x"}, 11), wait_each=1)
    text = 'RESOURCE_EXHAUSTED: CalculatorGraph::Run() failed: \nCalculator::Process() for node "node" failed: '
    assert text + "Node is already processing data. Create new stream for another request." in str(answers.failure)


@pytest.mark.parametrize("together", [True, False])
async def test_inputs_of_one_timestamp_meet_in_one_call(tmp_path: Path, together: bool) -> None:
    two = """
    class OvmsPythonModel:
        def execute(self, inputs):
            for number in range(3):
                yield [Tensor("out1", bytes(inputs[0])), Tensor("out2", bytes(inputs[1]))]
    """
    text = _numbered(python_node("handler.py", ["A:in1", "B:in2"], ["A:out1", "B:out2"], more=LOOPBACK), count=2)
    requests = [ask({"in1": b"a", "in2": b"b"}, 64)] if together else [ask({"in1": b"a"}, 64), ask({"in2": b"b"}, 64)]
    async with loaded(tmp_path / "g", text, handler=two) as graph:
        answers = await stream(graph, *requests)
    assert answers.outputs == [
        (stamp, name, text) for stamp in (64, 65, 66) for name, text in (("out1", "a"), ("out2", "b"))
    ]


async def test_independent_inputs_share_a_timestamp_over_several_requests(tmp_path: Path) -> None:
    nodes = [python_node("handler.py", [f"IN:in{n}"], [f"OUT:out{n}"], name=f"n{n}") for n in (1, 2, 3)]
    async with loaded(tmp_path / "g", _numbered(*nodes, count=3), handler=ECHO) as graph:
        apart = await stream(graph, *(ask({f"in{n}": b"%d" % n}, 64) for n in (1, 2, 3)))
        together = await stream(graph, ask({f"in{n}": b"%d" % n for n in (1, 2, 3)}, 64))
    expected = [(64, f"out{n}", str(n)) for n in (1, 2, 3)]
    assert sorted(apart.outputs) == sorted(together.outputs) == expected


async def test_immediate_policy_runs_for_each_input(tmp_path: Path) -> None:
    immediate = 'input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler" }'
    node = python_node("handler.py", ["A:in1", "B:in2"], ["A:out1", "B:out2"], more=immediate)
    async with loaded(tmp_path / "g", _numbered(node, count=2), handler=UPPER_ALL) as graph:
        answers = await stream(graph, ask({"in1": b"a"}), ask({"in2": b"b"}), ask({"in1": b"c"}))
    assert [(name, value) for _, name, value in answers.outputs] == [("out1", "A"), ("out2", "B"), ("out1", "C")]
    assert answers.failure is None


async def test_invalid_requests_leave_the_stream_open(tmp_path: Path) -> None:
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        short = ask({"in": np.zeros(4, np.float32)})
        short.raw_inputs[0] = bytes(3)
        answers = await stream(
            graph,
            short,
            ask({"in": b"one"}),
            ask({"unknown": b"x"}),
            ask({"in": b"two"}, model="another"),
            ask({"in": b"three"}, model_version="7"),
            ask({"in": b"four"}, model_version="1"),
        )
    first, unexpected, name, version = answers.problems
    assert first.startswith("Invalid content size of tensor proto - Invalid Python tensor buffer size.")
    assert first.endswith("; partial deserialization of first request")
    assert unexpected == "Unexpected input - unknown is unexpected; partial deserialization of subsequent requests"
    assert name == "Subsequent request with incorrect servable name; validate subsequent requests"
    assert version == "Subsequent request with incorrect servable version; validate subsequent requests"
    assert [text for _, _, text in answers.outputs] == ["one", "four"]
    assert answers.failure is None


async def test_replies_name_graph_and_version_and_have_no_id(tmp_path: Path) -> None:
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, id="first"), ask({"in": b"y"}, id="second"))
    assert {(reply.model_name, reply.model_version, reply.id) for reply in answers.replies} == {("graph", "1", "")}
    assert len(answers.replies) == 2


async def test_reserved_side_packet_is_refused(tmp_path: Path) -> None:
    async with loaded(tmp_path / "g", TEXT, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}, parameters={"py": "mine"}))
    assert isinstance(answers.failure, FailedPrecondition)
    assert "py is special reserved name" in str(answers.failure)
    assert answers.replies == []


async def test_missing_side_packet_fails_the_start(tmp_path: Path) -> None:
    text = TEXT.replace("PYTHON_NODE_RESOURCES:py", "PYTHON_NODE_RESOURCES:foo")
    async with loaded(tmp_path / "g", text, handler=ECHO) as graph:
        answers = await stream(graph, ask({"in": b"x"}))
    assert isinstance(answers.failure, FailedPrecondition)
    text = 'Failed to start mediapipe graph - Side packet "foo" is required but was not provided.'
    assert text in str(answers.failure)


async def test_failed_node_ends_the_stream_of_a_silent_client(tmp_path: Path) -> None:
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            raise ValueError('no such thing')
    """
    async with loaded(tmp_path / "g", TEXT, handler=source) as graph:
        with trio.fail_after(WAIT_SECONDS), pytest.raises(GraphFailure) as raised:
            async with graph.open_stream(ask({"in": b"x"})) as opened:
                assert [reply async for reply in opened.replies] == []
    assert str(raised.value).startswith(
        "Mediapipe execution failed. MP status - INTERNAL: CalculatorGraph::Run() failed: \n"
        'Calculator::Process() for node "node" failed: Error occurred during graph execution'
    )
    assert "ValueError: no such thing (handler.py:5)" in str(raised.value)


async def test_closing_a_stream_closes_its_generator(tmp_path: Path) -> None:
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


async def test_generator_stops_while_the_client_does_not_read(tmp_path: Path) -> None:
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


async def test_handler_sees_the_deadline_of_the_stream(tmp_path: Path) -> None:
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
