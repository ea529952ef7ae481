from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import pytest
import trio

from ovmstrio.core.errors import GraphFailure
from ovmstrio.core.generation import Conversation, GenerationRequest
from ovmstrio.graphs.instance import GraphInstance
from ovmstrio.isolation.isolated_code import Isolation
from tests.support.graphs import LOOPBACK, Answers, ask, graph_text, handler, loaded, python_node, stream, texts
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.core.request import InferResponse
    from ovmstrio.graphs.servable import GraphServable

COUNTING = """
class OvmsPythonModel:
    alive = 0
    def execute(self, inputs):
        count = int(bytes(inputs[0]))
        if count < 0:
            yield [Tensor("out", b"%d" % self.alive)]
            return
        self.alive += 1
        try:
            for number in range(count):
                yield [Tensor("out", b"%d" % number)]
        finally:
            self.alive -= 1
"""

PLACES = pytest.mark.parametrize("isolation", [None, Isolation()], ids=["threads", "process"])

GENERATIVE = graph_text(python_node("handler.py", more=LOOPBACK))


def _instances() -> int:
    gc.collect()
    return sum(isinstance(each, GraphInstance) for each in gc.get_objects())


def _tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def _alive(graph: GraphServable) -> int:
    answers = await stream(graph, ask({"in": b"-1"}))
    return int(answers.outputs[0][2])


async def _read(graph: GraphServable, count: int, leave_after: int | None) -> Answers:
    answers = Answers()
    with trio.CancelScope() as scope:
        async with graph.open_stream(ask({"in": b"%d" % count})) as opened:
            opened.end()
            async for reply in opened.replies:
                answers.take(reply)
                if len(answers.outputs) == leave_after:
                    scope.cancel()
    return answers


@PLACES
@pytest.mark.parametrize("leave_after", [1, 2, 31, 32, 33, 64, 65, 99])
async def test_stream_is_closed_after_any_number_of_replies(
    tmp_path: Path, isolation: Isolation | None, leave_after: int
) -> None:
    async with loaded(tmp_path / "g", GENERATIVE, isolation=isolation, handler=COUNTING) as graph:
        before = _tasks()
        answers = await _read(graph, 100, leave_after)
        assert len(answers.outputs) == leave_after
        assert await _alive(graph) == 0
        # Threads that wait for work have a task each.
        assert _tasks() - before <= 2
    del answers
    assert _instances() == 0


@PLACES
async def test_abandoned_streams_do_not_affect_others(tmp_path: Path, isolation: Isolation | None) -> None:
    received: list[list[str]] = []

    async def one(number: int) -> None:
        leave = 5 if number % 2 else None
        answers = await _read(graph, 20, leave)
        if leave is None:
            received.append([text for _, _, text in answers.outputs])

    threads = threading.active_count()
    async with loaded(tmp_path / "g", GENERATIVE, isolation=isolation, handler=COUNTING) as graph:
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(one, number)
        assert await _alive(graph) == 0
    assert received == [[str(number) for number in range(20)]] * 100
    assert _instances() == 0
    assert threading.active_count() <= threads + 64


@PLACES
@pytest.mark.parametrize("step", range(6))
async def test_failure_at_any_step_ends_the_stream(tmp_path: Path, isolation: Isolation | None, step: int) -> None:
    source = handler(f"""
    for number in range(6):
        if number == {step}:
            raise ValueError("step %d" % number)
        yield [Tensor("out", b"%d" % number)]
    """)
    async with loaded(tmp_path / "g", GENERATIVE, isolation=isolation, handler=source) as graph:
        answers = await stream(graph, ask({"in": b""}))
    assert [text for _, _, text in answers.outputs] == [str(number) for number in range(step)]
    assert isinstance(answers.failure, GraphFailure)
    assert f"ValueError: step {step} (handler.py:7)" in str(answers.failure)
    del answers
    assert _instances() == 0


@PLACES
async def test_first_failure_cancels_other_nodes(tmp_path: Path, isolation: Isolation | None) -> None:
    failing = handler("raise RuntimeError('first')")
    waiting = """
    import trio
    class OvmsPythonModel:
        async def execute(self, inputs):
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                self.was_cancelled = True
                raise
        def finalize(self):
            assert self.was_cancelled
            open(__file__ + ".done", "w").close()
    """
    text = graph_text(
        python_node("failing.py", outputs=["OUT:out"], name="failing"),
        python_node("waiting.py", outputs=["OUT:other"], name="waiting"),
        outputs=["OVMS_PY_TENSOR_A:out", "OVMS_PY_TENSOR_B:other"],
    )
    async with loaded(tmp_path / "g", text, isolation=isolation, failing=failing, waiting=waiting) as graph:
        with (
            trio.fail_after(WAIT_SECONDS),
            pytest.raises(GraphFailure, match=r'node "failing" failed: .*RuntimeError: first'),
        ):
            await graph.infer(ask({"in": b""}))
    assert (tmp_path / "g" / "waiting.py.done").exists()


@PLACES
async def test_deadline_closes_the_generator(tmp_path: Path, isolation: Isolation | None) -> None:
    async with loaded(tmp_path / "g", GENERATIVE, isolation=isolation, handler=COUNTING) as graph:
        with trio.move_on_after(0.2) as scope:
            await graph.infer(ask({"in": b"100000000"}))
        assert scope.cancelled_caught
        assert await _alive(graph) == 0
    assert _instances() == 0


@PLACES
async def test_calls_are_answered_while_a_stream_stalls(tmp_path: Path, isolation: Isolation | None) -> None:
    async with (
        loaded(tmp_path / "g", GENERATIVE, isolation=isolation, handler=COUNTING) as graph,
        graph.open_stream(ask({"in": b"10000"})) as stalled_streams,
    ):
        await stalled_streams.replies.receive()
        answers: list[InferResponse] = [await graph.infer(ask({"in": b"-1"})) for _ in range(5)]
        stalled_streams.end()
        seen = 1
        async for _ in stalled_streams.replies:
            seen += 1
    assert [texts(answer) for answer in answers] == [{"out": "1"}] * 5
    assert seen == 10_000


@PLACES
async def test_generator_of_a_chat_is_closed_with_it(tmp_path: Path, isolation: Isolation | None) -> None:
    body = """
    try:
        while True:
            yield [Tensor("text", b"x")]
    finally:
        pathlib.Path(__file__).with_name("closed").write_text("closed")
    """
    endless = handler(body, head="import pathlib")
    node = python_node("handler.py", ["IN:prompt"], ["TEXT:text"], more=LOOPBACK)
    text = graph_text(node, inputs=["OVMS_PY_TENSOR:prompt"], outputs=["OVMS_PY_TENSOR:text"])
    closed = tmp_path / "g" / "closed"
    request = GenerationRequest(Conversation(({"role": "user", "content": "x"},)))
    async with loaded(tmp_path / "g", text, isolation=isolation, handler=endless) as graph:
        for is_cancelled in (False, True):
            with trio.CancelScope() as scope:
                async with graph.generate(request) as generation:
                    assert (await anext(aiter(generation))).text == "x"
                    if is_cancelled:
                        scope.cancel()
                        await trio.lowlevel.checkpoint()
            assert scope.cancelled_caught is is_cancelled
            assert closed.read_text() == "closed"
            closed.unlink()
