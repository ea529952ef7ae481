from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.core.errors import ConfigError, ModelFailure
from ovmstrio.core.service import on_readiness_changed
from ovmstrio.ext.ops import Op, PipelineRequest, PipelineResponse
from ovmstrio.ops.executor import Executor, open_executor
from ovmstrio.ops.executor.channel import Result, Sample
from ovmstrio.ops.executor.workers import WorkerPool
from ovmstrio.ops.graph import OpGraph
from ovmstrio.ops.messages import from_array
from ovmstrio.ops.observing.hooks import NULL_HOOKS, ChannelState, OpHooks, Span, Stage
from ovmstrio.ops.settings import OpSettings
from tests.support.ops import (
    Model,
    TextOp,
    asking,
    infer_until_deadline,
    op_class,
    settings,
    single,
    text_graph,
    with_model,
)
from tests.support.pipelines import gather
from tests.support.waits import Gate

CLOSED = (3001, "dag closed.")


def answer_of(response: PipelineResponse) -> Any:
    return response.values[0] if not response.err_no else (response.err_no, response.err_msg)


async def infer_once(graph: OpGraph, **dag: Any) -> Any:
    async with open_executor(graph, settings(**dag)) as executor:
        return answer_of(await executor.infer(asking()))


def timed_graph(*edges: str, make: type[TextOp] = TextOp, **seconds: float) -> OpGraph:
    graph = text_graph(*edges, make=make)
    for name, duration in seconds.items():
        graph.ops[name].seconds = duration  # type: ignore[attr-defined] # of TextOp
    return graph


# Flow


async def test_inputs_are_named_after_their_ops() -> None:
    names = op_class(preprocess=lambda _, inputs: {"x": " ".join(inputs)})
    assert await infer_once(text_graph("a<@", "b<@", "c<a b @", make=names)) == "a b @DAGExecutor"


async def test_each_consumer_has_its_own_copy() -> None:
    def append(op: Op, inputs: Mapping[str, Any]) -> Any:
        values = [value for one in inputs.values() for value in one.get("list", [])]
        for one in inputs.values():
            one.setdefault("list", []).append(op.name)
        return {"list": [*values, op.name]}

    def write(op: Op, inputs: Any, output: Any) -> Any:
        return {"x": " ".join(output["list"])} if op.name == "d" else output

    changing = op_class(preprocess=append, postprocess=write)
    assert await infer_once(text_graph("a<@", "b<a", "c<a", "d<b c", make=changing)) == "a b a c d"


async def test_branches_run_at_the_same_time(autojump_clock: MockClock) -> None:
    begin = trio.current_time()
    assert await infer_once(timed_graph("a<@", "b<@", "c<a b", a=3.0, b=2.0)) == "c(a(x),b(x))"
    assert trio.current_time() - begin == pytest.approx(3.0)


class _Failing(TextOp):
    """Op that fails if its name is in its input."""

    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        await trio.sleep(self.seconds)
        text = next(iter(input_dicts.values()))["x"]
        if self.name in text:
            raise RuntimeError(f"it's {self.name}")
        return {"x": text}


async def test_the_first_failure_is_answered_at_once(autojump_clock: MockClock) -> None:
    graph = timed_graph("a<@", "b<@", "c<a b", make=_Failing, a=1.0, b=50.0)
    async with open_executor(graph, settings()) as executor:
        begin = trio.current_time()
        response = await executor.infer(asking("a", logid=7))
        assert trio.current_time() - begin == pytest.approx(1.0)
        where = "ClassName: Op._run_preprocess.<locals>.preprocess_help  FunctionName: preprocess_help"
        assert answer_of(response) == (10000, f"Log_id: 7  Raise_msg: its a  {where}")
        assert [channel.size for channel in executor.channels()] == [0, 0, 0, 0]
        assert executor.in_flight == 0
        assert (await executor.infer(asking("x"))).err_no == 0


async def test_with_first_arrivals_the_faster_branch_answers(autojump_clock: MockClock) -> None:
    pipeline = settings(channel_recv_frist_arrive=True, ops=dict.fromkeys("abc", OpSettings(concurrency=20)))
    async with open_executor(timed_graph("a<@", "b<@", "c<a b", a=5.0, b=1.0), pipeline) as executor:
        responses = await gather(executor.infer, [asking(str(number)) for number in range(20)])
    assert [response.values for response in responses] == [[f"c(b({number}))"] for number in range(20)]


@pytest.mark.parametrize(("slow", "code"), [(5.0, 0), (1.0, 10000)], ids=["after the join", "before the join"])
async def test_with_first_arrivals_a_failure_counts_before_the_join(
    autojump_clock: MockClock, slow: float, code: int
) -> None:
    graph = timed_graph("a<@", "b<a", "c<@", "d<b c", "e<d", make=_Failing, a=slow, c=2.0, e=9.0)
    async with open_executor(graph, settings(channel_recv_frist_arrive=True)) as executor:
        assert (await executor.infer(asking("a"))).err_no == code


def _append_plus(_: Op, inputs: Mapping[str, Any]) -> Any:
    return {"x": inputs[min(inputs)]["x"] + "+"}


async def test_a_jump_repeats_a_loop_of_ops() -> None:
    def is_short(_: Op, batch: Any) -> bool:
        (data,) = batch.values()
        return len(data.parse()["x"]) < 8

    counting = op_class(preprocess=_append_plus, check_jumping=is_short)
    assert await infer_once(text_graph("a<@", "b<a", "c<b", make=counting, jumps={"c": "a"})) == "x+++++++"


async def test_a_loop_has_at_most_a_thousand_jumps() -> None:
    endless = op_class(preprocess=_append_plus, check_jumping=lambda *_: True)
    answer = await infer_once(text_graph("a<@", "b<a", make=endless, jumps={"b": "a"}))
    assert answer == (10000, "Op b exceeded 1000 jumps for one request")


async def test_older_requests_go_first(autojump_clock: MockClock) -> None:
    order: list[str] = []

    async def note(op: Op, inputs: Mapping[str, Any]) -> Any:
        (one,) = inputs.values()
        await trio.sleep(float(one["x"]) if op.name == "a" else 10)
        if op.name == "b":
            order.append(one["x"])
        return dict(one)

    graph = text_graph("a<@", "b<a", make=op_class(preprocess=note))
    async with (
        open_executor(graph, settings(ops={"a": OpSettings(concurrency=5)})) as executor,
        trio.open_nursery() as nursery,
    ):
        for seconds in ("5", "4", "3", "2", "1"):
            nursery.start_soon(executor.infer, asking(seconds))
            await wait_all_tasks_blocked()
    assert order == ["1", "5", "4", "3", "2"]


# Admission, deadlines and the end


async def test_worker_num_requests_run_at_once_and_max_queue_wait(autojump_clock: MockClock) -> None:
    ends: list[tuple[int, int, bool]] = []
    pipeline = settings(worker_num=2, max_queue=3, ops={"a": OpSettings(concurrency=9)})
    async with (
        open_executor(timed_graph("a<@", a=1.0), pipeline) as executor,
        trio.open_nursery() as nursery,
    ):
        begin = trio.current_time()

        async def infer() -> None:
            response = await executor.infer(asking())
            ends.append((round(trio.current_time() - begin), response.err_no, response.is_overload))

        for _ in range(6):
            nursery.start_soon(infer)
            await wait_all_tasks_blocked()
    assert ends == [(0, 3002, True), *[(1, 0, False)] * 2, *[(2, 0, False)] * 2, (3, 0, False)]


async def test_the_pipeline_limits_the_time_of_every_request(autojump_clock: MockClock) -> None:
    async with open_executor(timed_graph("a<@", a=1e6), settings(request_timeout=2000)) as executor:
        begin = trio.current_time()
        assert (await executor.infer(asking())).err_no == 6000
        assert trio.current_time() - begin == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("seconds", "answers"),
    [(4.0, [CLOSED, "a(x)"]), (40.0, [CLOSED, CLOSED])],
    ids=["ends within the grace", "goes on after it"],
)
async def test_a_pipeline_that_closes_answers_every_request(
    autojump_clock: MockClock, seconds: float, answers: list[Any]
) -> None:
    received: list[Any] = []

    async def infer(executor: Executor) -> None:
        received.append(answer_of(await executor.infer(asking())))

    async with trio.open_nursery() as nursery:
        pipeline = settings(worker_num=1)
        async with open_executor(timed_graph("a<@", a=seconds), pipeline, grace_seconds=5) as executor:
            for _ in range(2):
                nursery.start_soon(infer, executor)
                await wait_all_tasks_blocked()
        assert executor.unready_reason() == "the pipeline is closed"
        assert answer_of(await executor.infer(asking())) == CLOSED
    assert received == answers


# Start of workers


async def test_each_worker_has_its_own_copy_of_the_op() -> None:
    prepared: list[tuple[int, Any]] = []

    def init_op(op: Any) -> None:
        op.mine = object()
        prepared.append((op.concurrency_idx, op.mine))

    async with open_executor(single(op_class(init_op=init_op), concurrency=3), settings()) as executor:
        assert executor.unready_reason() == ""
        assert sorted(index for index, _ in prepared) == [0, 1, 2]
        assert len({mine for _, mine in prepared}) == 3


def _fail(_: Op) -> None:
    raise OSError("no such dictionary")


async def _fail_on_loop(_: Op) -> None:
    raise OSError("no such dictionary")


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            op_class(init_op=_fail),
            r'(?s)init_op of Op op raised OSError: no such.*raise OSError\("no such dictionary"\)',
        ),
        (
            op_class(init_op=_fail_on_loop),
            r'(?s)init_op of Op op raised OSError.*raise OSError\("no such dictionary"\)',
        ),
        (
            op_class(preprocess=lambda self, inputs, data_id, log_id, more: {}),
            r"preprocess of Op op .*found preprocess.self, inputs, data_id, log_id, more",
        ),
        (
            op_class(preprocess=lambda self: {}),
            r"preprocess of Op op cannot be called .*ids optional, found preprocess\(self\)",
        ),
    ],
    ids=["init_op raises", "init_op raises on the loop", "too many parameters", "too few parameters"],
)
async def test_an_op_that_cannot_run_ends_the_start(op: type[Op], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with open_executor(single(op), settings()):
            raise AssertionError("it was opened")


# Workers that are stuck or cannot be started again


class _Blocking(Op):
    """Op that blocks in a thread for ``wait``; replicas after the first start only if the test allows it."""

    release: Gate
    may_start: threading.Event
    copies: list[int]
    started: trio.Event

    async def init_op(self) -> None:
        self.copies.append(1)
        if len(self.copies) > 1 and not self.may_start.is_set():
            raise RuntimeError("no more")
        self.started.set()

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (one,) = input_dicts.values()
        if one["x"] == "wait":
            self.release.wait()
        return dict(one)


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Blocking]]:
    monkeypatch.setattr("ovmstrio.ops.executor.workers.GRACE_SECONDS", 0.01)
    _Blocking.release, _Blocking.may_start, _Blocking.copies = Gate(), threading.Event(), []
    _Blocking.started = trio.Event()
    yield _Blocking
    _Blocking.release.set()


async def wait_for_next_copy(executor: Executor, blocking: type[_Blocking], cause: threading.Event | Gate) -> None:
    """Set what the start of the next copy waits for, and check that the copy answers."""
    blocking.started = trio.Event()
    cause.set()
    await blocking.started.wait()
    await wait_all_tasks_blocked()
    assert executor.unready_reason() == ""
    assert (await executor.infer(asking())).values == ["x"]


async def test_requests_get_the_reason_while_a_worker_cannot_be_started_again(
    mock_clock: MockClock, blocking: type[_Blocking]
) -> None:
    async with open_executor(single(blocking), settings()) as executor:
        assert (await infer_until_deadline(executor, blocking.release.next_arrival(), mock_clock)).err_no == 6000
        response = await executor.infer(asking())
        assert executor.unready_reason() == "no worker of op runs"
        assert response.err_no == 10000
        assert "no worker of Op op can be started: init_op of Op op raised RuntimeError: no more" in response.err_msg
        await wait_for_next_copy(executor, blocking, blocking.may_start)


async def test_the_number_of_stuck_copies_is_limited(
    mock_clock: MockClock, blocking: type[_Blocking], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.ops.executor.workers.MAX_STUCK_INSTANCES", 2)
    blocking.may_start.set()
    async with open_executor(single(blocking), settings(worker_num=1)) as executor:
        for _ in range(2):
            assert (await executor.infer(asking())).values == ["x"]
            assert (await infer_until_deadline(executor, blocking.release.next_arrival(), mock_clock)).err_no == 6000
        assert "2 hooks of Op op do not end" in (await executor.infer(asking())).err_msg
        await wait_for_next_copy(executor, blocking, blocking.release)


async def test_a_copy_is_replaced_when_many_of_its_threads_are_stuck(
    mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.ops.executor.workers.GRACE_SECONDS", 0.01)
    copies: list[Op] = []
    release = Gate()

    def process(_: Op, feeds: Any) -> Any:
        if feeds[0]["x"] == "wait":
            release.wait()
        return dict(feeds[0])

    stuck = op_class(init_op=lambda op: copies.append(op), process=process)  # noqa: PLW0108 - only functions become methods
    try:
        async with open_executor(single(stuck), settings(worker_num=1)) as executor:
            for made in (*[1] * 7, 2, 2):
                assert (await infer_until_deadline(executor, release.next_arrival(), mock_clock)).err_no == 6000
                assert answer_of(await executor.infer(asking("next"))) == "next"
                assert len(copies) == made
    finally:
        release.set()


async def test_requests_wait_a_minute_for_a_worker_that_recovers(autojump_clock: MockClock) -> None:
    class SlowWorker:
        index = 0
        needs_recovery = True

        async def run(self, samples: Sequence[Sample]) -> list[Result]:
            return [Result({}) for _ in samples]

        async def recover(self) -> None:
            await trio.sleep(100)

    readiness: list[bool] = []
    with on_readiness_changed(lambda: readiness.append(pool.is_working)):
        async with trio.open_nursery() as nursery:
            pool = WorkerPool("op", [SlowWorker()], nursery, NULL_HOOKS)
            begin = trio.current_time()
            ends: list[tuple[float, Result]] = []
            for at, is_answered in ((0.0, True), (60.0, False), (60.0, False), (100.0, True)):
                if at == 100.0:
                    await trio.sleep(50)
                (result,) = await pool.run([Sample(0, 0, {})])
                ends.append((trio.current_time() - begin, result))
                assert (result.failure is None) == pool.is_working == is_answered
            assert [seconds for seconds, _ in ends] == [0.0, 60.0, 60.0, 110.0]
            assert ends[1][1].failure is not None
            assert "worker 0 has not started within 60 s" in ends[1][1].failure.info
            nursery.cancel_scope.cancel()
    assert readiness[:2] == [False, True]


# Values and models that fail


class _Odd(np.ndarray[Any, Any]):
    @property
    def size(self) -> Any:
        raise LookupError("odd")

    @property
    def nbytes(self) -> Any:
        raise LookupError("odd")


@pytest.mark.parametrize(
    ("edges", "code"),
    [(["a<@"], 8000), (["a<@", "b<a", "c<a", "d<b c"], 10000)],
    ids=["packed", "read by the next Ops"],
)
async def test_a_value_whose_size_cannot_be_read_is_an_error(edges: list[str], code: int) -> None:
    def return_odd(op: Op, inputs: Any, output: Any) -> Any:
        return {"x": np.zeros(1).view(_Odd)} if op.name == "a" else output

    make = op_class(preprocess=lambda _, inputs: {"x": str(list(inputs.values()))}, postprocess=return_odd)
    async with open_executor(text_graph(*edges, make=make), settings()) as executor:
        for _ in range(2):
            response = await executor.infer(asking())
            assert response.err_no == code
            assert "odd" in response.err_msg
        assert executor.in_flight == 0


@pytest.mark.parametrize("error", [ModelFailure("it broke"), RuntimeError("it broke")])
async def test_a_failure_of_a_model_is_an_error_of_its_op(error: Exception) -> None:
    make = Model(error=error).make
    async with open_executor(single(Op), settings(ops=with_model()), make_predictor=make) as executor:
        response = await executor.infer(PipelineRequest(tensors=[from_array("x", np.zeros((1, 1)))]))
    assert response.err_no == 10000
    assert response.err_msg.startswith("[op] failed to predict. Log_id: 0  Raise_msg: it broke. Please check")


# Observation


class _Recorder(OpHooks):
    def __init__(self) -> None:
        self.stages: list[tuple[str, Stage]] = []
        self.spans: list[Span] = []
        self.channels: Callable[[], Sequence[ChannelState]] = tuple
        self.ends: list[tuple[int, int, int | None]] = []

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        self.channels = channels

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        if tuple(data_ids) == (0,):
            self.stages.append((op, stage))
        self.spans.append(span)

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        self.ends.append((data_id, log_id, code))


async def test_hooks_receive_every_stage_and_end() -> None:
    recorder, make = _Recorder(), Model(0.01).make
    async with open_executor(single(Op), settings(ops=with_model()), make_predictor=make, hooks=recorder) as executor:
        tensor = from_array("x", np.zeros((1, 1)))
        await executor.infer(PipelineRequest(tensors=[tensor], logid=5))
        with trio.move_on_after(0.001):
            await executor.infer(PipelineRequest(tensors=[tensor], logid=6))
    assert recorder.stages == [
        ("@DAGExecutor", "prepack"), ("op", "in"), ("op", "prep"), ("op", "midp"), ("op", "postp"), ("op", "out"),
        ("@DAGExecutor", "postpack"),
    ]  # fmt: skip
    assert all(begin <= end for begin, end in recorder.spans)
    assert recorder.ends == [(0, 5, 0), (1, 6, None)]


async def test_channels_report_the_samples_that_wait(autojump_clock: MockClock) -> None:
    recorder, graph = _Recorder(), timed_graph("a<@", "b<@", "c<a b", a=1.0)
    async with (
        open_executor(graph, settings(channel_size=9), hooks=recorder) as executor,
        trio.open_nursery() as nursery,
    ):
        for _ in range(4):
            nursery.start_soon(executor.infer, asking())
        await wait_all_tasks_blocked()
        assert recorder.channels() == [
            ChannelState("chl0", ("@DAGExecutor",), ("a",), 3, 9),
            ChannelState("chl1", ("@DAGExecutor",), ("b",), 0, 9),
            ChannelState("chl2", ("a", "b"), ("c",), 0, 9),
            ChannelState("chl3", ("c",), ("@DAGExecutor",), 0),
        ]
