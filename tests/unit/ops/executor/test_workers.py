from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.reconsidering import readiness_reconsidered
from ovmstrio.ops import Op, PipelineRequest
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.executor import open_executor
from ovmstrio.runtimes.ops.executor.channel import Result, Sample
from ovmstrio.runtimes.ops.executor.executor import Executor
from ovmstrio.runtimes.ops.executor.opening import kept_by_preprocess
from ovmstrio.runtimes.ops.executor.workers import WorkerPool
from ovmstrio.runtimes.ops.observing.hooks import NULL, ChannelState, Several, Span, Stage
from ovmstrio.runtimes.ops.tensors import from_array
from tests.support.ops import Model, TextOp, asking, infer_until_deadline, settings, single, text_graph, with_model
from tests.support.waits import Gate


class Blocking(Op):
    release = Gate()
    may_start = threading.Event()
    made: list[int] = []  # noqa: RUF012 - shared by the copies of the workers
    started = trio.Event()

    async def init_op(self) -> None:
        self.made.append(1)
        if len(self.made) > 1 and not self.may_start.is_set():
            raise RuntimeError("no more")
        self.started.set()

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (one,) = input_dicts.values()
        if one["x"] == "wait":
            self.release.wait()
        return dict(one)


async def works_again(executor: Executor, blocking: type[Blocking], awaited: threading.Event | Gate) -> None:
    """See that a worker is there, and answers, when what it waits for has come."""
    blocking.started = trio.Event()
    awaited.set()
    await blocking.started.wait()
    await wait_all_tasks_blocked()
    assert executor.obstacle() == ""
    assert (await executor.infer(asking())).values == ["x"]


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> type[Blocking]:
    """Give the Op, with nothing made yet and short graces."""
    monkeypatch.setattr("ovmstrio.runtimes.ops.executor.workers.GRACE_SECONDS", 0.01)
    Blocking.made.clear()
    Blocking.release.clear()
    Blocking.may_start.clear()
    monkeypatch.setattr(Blocking, "started", trio.Event())
    return Blocking


async def test_a_worker_that_cannot_be_started_again_is_told(
    mock_clock: trio.testing.MockClock, blocking: type[Blocking]
) -> None:
    """Requests are answered at once with the reason, and again with results when it can."""
    try:
        async with open_executor(single(blocking), settings()) as executor:
            assert (await infer_until_deadline(executor, blocking.release.next_arrival(), mock_clock)).err_no == 6000
            response = await executor.infer(asking())
            assert executor.obstacle() == "no worker of op runs"
            assert response.err_no == 10000
            assert (
                "no worker of Op op can be started: init_op of Op op raised RuntimeError: no more" in response.err_msg
            )
            await works_again(executor, blocking, blocking.may_start)
    finally:
        blocking.release.set()


async def test_hooks_that_never_end_make_an_op_fail_at_last(
    mock_clock: trio.testing.MockClock, blocking: type[Blocking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no end of threads: after some copies the Op says why, until one of them has ended."""
    monkeypatch.setattr("ovmstrio.runtimes.ops.executor.workers.MOST_STUCK", 2)
    blocking.may_start.set()
    try:
        async with open_executor(single(blocking), settings()) as executor:
            for _ in range(2):
                assert (
                    await infer_until_deadline(executor, blocking.release.next_arrival(), mock_clock)
                ).err_no == 6000
            assert "2 hooks of Op op do not end" in (await executor.infer(asking())).err_msg
            await works_again(executor, blocking, blocking.release)
    finally:
        blocking.release.set()


class Slow:
    index = 0
    is_spoiled = True

    async def run(self, samples: Sequence[Sample]) -> list[Result]:
        return [Result({}) for _ in samples]

    async def recover(self) -> None:
        await trio.sleep(100)


async def test_who_waits_for_a_worker_that_takes_long_to_recover_is_told(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Requests wait for a minute at most, and are served again when it is back; so are those who ask for readiness."""
    seen: list[bool] = []
    with readiness_reconsidered(lambda: seen.append(pool.is_working)):
        async with trio.open_nursery() as nursery:
            pool = WorkerPool("op", [Slow()], nursery, NULL)
            begin = trio.current_time()
            ends: list[tuple[float, Result]] = []
            for at, ok in ((0.0, True), (60.0, False), (60.0, False), (100.0, True)):
                if at == 100.0:
                    await trio.sleep(50)
                (result,) = await pool.run([Sample(0, 0, {})])
                ends.append((trio.current_time() - begin, result))
                assert (result.failure is None) == ok
                assert pool.is_working == ok
            assert [seconds for seconds, _ in ends] == [0.0, 60.0, 60.0, 110.0]
            assert ends[1][1].failure is not None
            assert "worker 0 has not started within 60 s" in ends[1][1].failure.info
            nursery.cancel_scope.cancel()
    assert seen[:2] == [False, True]


class Odd(np.ndarray[Any, Any]):
    @property
    def size(self) -> Any:
        raise LookupError("odd")

    @property
    def nbytes(self) -> Any:
        raise LookupError("odd")


class GivingOdd(TextOp):
    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": np.zeros(1).view(Odd)} if self.name in fetch_data["x"].split("(x")[0] else fetch_data


@pytest.mark.parametrize(("edges", "code"), [(["a<@"], 8000), (["a<@", "b<a", "c<a", "d<b c"], 10000)])
async def test_values_that_break_what_they_touch_are_errors(edges: list[str], code: int) -> None:
    """Be it the answer that is made of them, or what is copied for several Ops."""
    async with open_executor(text_graph(*edges, make=GivingOdd), settings()) as executor:
        for _ in range(2):
            response = await executor.infer(asking())
            assert response.err_no == code
            assert "odd" in response.err_msg
        assert executor.in_flight == 0


class Offsets(Op):
    def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        return {"y": feed_batch[0]["x"], "y.lod": list(range(len(feed_batch[0]["x"]) + 1))}

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": str(fetch_data["y"].sum())}


async def test_an_output_that_cannot_be_split_is_made_again() -> None:
    """Each sample gets a run of its own."""
    ops = {"op": OpSettings("op", batch_size=2, auto_batching_timeout=1000)}
    answers: list[str] = []
    async with open_executor(single(Offsets), settings(ops=ops)) as executor, trio.open_nursery() as nursery:

        async def ask() -> None:
            request = PipelineRequest(tensors=[from_array("x", np.ones((2, 1)))])
            answers.extend((await executor.infer(request)).values)

        nursery.start_soon(ask)
        nursery.start_soon(ask)
    assert answers == ["2.0", "2.0"]


@pytest.mark.parametrize("error", [ModelFailure("it broke"), RuntimeError("it broke")])
async def test_a_model_that_fails_is_an_error(error: Exception) -> None:
    """The answer names the Op and has the model's words."""
    model = Model(error=error)
    async with open_executor(single(Op), settings(ops=with_model()), make_predictor=model.make) as executor:
        response = await executor.infer(PipelineRequest(tensors=[from_array("x", np.zeros((1, 1)))]))
    assert response.err_no == 10000
    assert response.err_msg.startswith("[op] failed to predict. Log_id: 0  Raise_msg: it broke. Please check")


class Seen(Several):
    def __init__(self) -> None:
        super().__init__()
        self.stages: list[tuple[str, Stage, tuple[int, ...]]] = []
        self.spans: list[Span] = []
        self.channels: Callable[[], Sequence[ChannelState]] = tuple
        self.ends: list[tuple[int, int, int | None]] = []

    def opened(self, ops: Sequence[str], channels: Callable[[], Sequence[ChannelState]]) -> None:
        self.channels = channels

    def stage(self, op: str, worker: int, stage: Stage, data_ids: Sequence[int], span: Span) -> None:
        self.stages.append((op, stage, tuple(data_ids)))
        self.spans.append(span)

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        self.ends.append((data_id, log_id, code))


async def test_observers_are_told_of_every_stage_and_end() -> None:
    """Of each Op's waiting, hooks and handing on, and of what becomes of requests, of those that leave, too."""
    seen = Seen()
    async with open_executor(
        single(Op), settings(ops=with_model()), make_predictor=Model(0.01).make, hooks=seen
    ) as executor:
        await executor.infer(PipelineRequest(tensors=[from_array("x", np.zeros((1, 1)))], logid=5))
        with trio.move_on_after(0.001):
            await executor.infer(PipelineRequest(tensors=[from_array("x", np.zeros((1, 1)))], logid=6))
    of_first = [(op, stage) for op, stage, data_ids in seen.stages if data_ids == (0,)]
    assert of_first == [
        ("@DAGExecutor", "prepack"), ("op", "in"), ("op", "prep"), ("op", "midp"), ("op", "postp"), ("op", "out"),
        ("@DAGExecutor", "postpack"),
    ]  # fmt: skip
    assert all(begin <= end for begin, end in seen.spans)
    assert seen.ends == [(0, 5, 0), (1, 6, None)]


async def test_channels_tell_what_waits_in_them(autojump_clock: trio.testing.MockClock) -> None:
    """By the names of who fills and who empties them."""
    seen = Seen()
    graph = text_graph("a<@", "b<@", "c<a b")
    graph.ops["a"].seconds = 1.0  # type: ignore[attr-defined] # of TextOp
    async with (
        open_executor(graph, settings(channel_size=9), hooks=seen) as executor,
        trio.open_nursery() as nursery,
    ):
        for _ in range(4):
            nursery.start_soon(executor.infer, asking())
        await wait_all_tasks_blocked()
        assert seen.channels() == [
            ChannelState("chl0", ("@DAGExecutor",), ("a",), 3, 9),
            ChannelState("chl1", ("@DAGExecutor",), ("b",), 0, 9),
            ChannelState("chl2", ("a", "b"), ("c",), 0, 9),
            ChannelState("chl3", ("c",), ("@DAGExecutor",), 0),
        ]


class Keeping(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (self.given,) = input_dicts.values()
        other = self
        other.unseen = 1  # type: ignore[attr-defined] # under another name
        self.number = data_id
        return self.given


async def test_a_batch_for_an_op_that_keeps_state_is_warned_of() -> None:
    """The attributes are named; without batches all is well."""
    assert kept_by_preprocess(Keeping(name="op")) == ["given", "number"]
    assert kept_by_preprocess(TextOp(name="op")) == []
    with capture_logs() as logs:
        for size in (1, 2):
            ops = {"op": OpSettings("op", batch_size=size, auto_batching_timeout=10)}
            async with open_executor(single(Keeping), settings(ops=ops)):
                pass
    assert [log["attributes"] for log in logs if "attributes" in log] == [["given", "number"]]


async def test_large_answers_are_printed_beside_the_loop() -> None:
    """Whole, and as small ones are."""
    array = np.arange(50_000)
    async with open_executor(single(Op), settings()) as executor:
        response = await executor.infer(PipelineRequest(tensors=[from_array("x", array)]))
    (text,) = response.values
    assert text.startswith("array([    0,     1,")
    np.testing.assert_array_equal(np.asarray(eval(text, {"array": list})), array)
