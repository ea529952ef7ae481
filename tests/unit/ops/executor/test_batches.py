from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from ovmstrio.ext.ops import Op, PipelineResponse
from ovmstrio.ops.executor import Executor, open_executor
from ovmstrio.ops.observing.hooks import NULL_HOOKS, OpHooks
from ovmstrio.ops.settings import OpSettings
from tests.support.ops import asking, op_class, settings, single, text_graph
from tests.support.waits import WAIT_SECONDS


class _Rows(Op):
    """Op that doubles rows such as ``1,2;3,4``.

    A feed with 13 raises, one with 99 takes long, and one with 7 gets too few rows.
    """

    seconds = 0.0
    fed: list[list[Any]] = []  # noqa: RUF012 - shared by the copies of the workers

    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        kind, _, rest = input_dicts["@DAGExecutor"]["x"].partition(" ")
        if kind == "text":
            return {"x": rest.split(",")}
        rows = [[float(one) for one in row.split(",")] for row in rest.split(";")]
        if kind == "list":
            return [{"x": np.asarray([row])} for row in rows]
        return {"x": np.asarray(rows)}, kind == "skip", None, ""

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        (feed,) = feed_batch
        self.fed.append(feed["x"] if isinstance(feed["x"], list) else feed["x"].tolist())
        await trio.sleep(self.seconds)
        if isinstance(feed["x"], list):
            return {"y": [text.upper() for text in feed["x"]]}
        if 13.0 in feed["x"]:
            raise RuntimeError("13 is bad")
        if 99.0 in feed["x"]:
            await trio.sleep(1000)
        if 7.0 in feed["x"]:
            return {"y": np.asarray([1.0])}
        offsets = np.arange(len(feed["x"]) + 1, dtype=np.int32) * feed["x"].shape[1]
        # Offsets in a list cannot be split.
        kept = offsets.tolist() if 5.5 in feed["x"] else offsets
        return {"y": feed["x"] * 2, "flat": feed["x"].reshape(-1), "flat.lod": kept}

    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        if isinstance(fetch_data, list):
            return {"x": str([one["y"].tolist() for one in fetch_data])}
        return {"x": str([value if isinstance(value, list) else value.tolist() for value in fetch_data.values()])}


class _Batches(OpHooks):
    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        self.ids.append(list(data_ids))


@asynccontextmanager
async def opened(
    batch_size: int, wait: int, *, worker_num: int = 100, op: type[Op] = _Rows, hooks: OpHooks = NULL_HOOKS, **more: Any
) -> AsyncIterator[Executor]:
    _Rows.fed.clear()
    one = OpSettings("op", batch_size=batch_size, auto_batching_timeout=wait, **more)
    async with open_executor(single(op), settings(worker_num=worker_num, ops={"op": one}), hooks=hooks) as executor:
        yield executor


async def infer_all(executor: Executor, *texts: str, pause: float = 0.0) -> list[tuple[float, PipelineResponse]]:
    """Send requests with a pause after each, and return when each was answered, and its response."""
    found: dict[int, tuple[float, PipelineResponse]] = {}
    begin = trio.current_time()

    async def infer(number: int, text: str) -> None:
        response = await executor.infer(asking(text))
        found[number] = (round(trio.current_time() - begin, 6), response)

    async with trio.open_nursery() as nursery:
        for number, text in enumerate(texts):
            nursery.start_soon(infer, number, text)
            await wait_all_tasks_blocked()
            await trio.sleep(pause)
    return [found[number] for number in range(len(texts))]


def texts_of(answers: list[tuple[float, PipelineResponse]]) -> list[Any]:
    return [response.err_no or response.values[0] for _, response in answers]


@pytest.mark.parametrize(
    ("batching", "requests", "pause", "seconds"),
    [
        pytest.param({"batch_size": 4, "wait": 500}, 4, 0.0, 0.0, id="a full batch starts at once"),
        pytest.param({"batch_size": 4, "wait": 500}, 1, 0.0, 0.5, id="one sample waits for its time"),
        pytest.param({"batch_size": 4, "wait": 500}, 3, 0.2, 0.5, id="the time begins with the first sample"),
        pytest.param({"batch_size": 8, "wait": 0, "worker_num": 3}, 3, 0.0, 0.0, id="no more requests can come"),
    ],
)
async def test_when_batches_start(
    autojump_clock: trio.testing.MockClock, batching: dict[str, Any], requests: int, pause: float, seconds: float
) -> None:
    async with opened(**batching) as executor:
        await trio.sleep(0.3)
        answers = await infer_all(executor, *["array 1"] * requests, pause=pause)
    assert [took for took, _ in answers] == [seconds] * requests
    assert len(_Rows.fed) == 1


async def test_workers_run_their_batches_at_the_same_time(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Rows, "seconds", 1.0)
    async with opened(2, 50, concurrency=2) as executor:
        answers = await infer_all(executor, *["array 1"] * 4)
    assert [seconds for seconds, _ in answers] == [1.0] * 4


async def test_batches_without_a_time_start_when_no_request_is_on_its_way(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with capture_logs() as logs:
        async with opened(3, 0) as executor:
            (alone,) = await infer_all(executor, "array 1")
            both = await infer_all(executor, *["array 1"] * 2)
            full = await infer_all(executor, *["array 1"] * 3)
    assert alone[0] == pytest.approx(0.01)
    assert [seconds for seconds, _ in both] == [pytest.approx(0.01)] * 2
    assert [seconds for seconds, _ in full] == [0.0] * 3
    assert [len(fed) for fed in _Rows.fed] == [1, 2, 3]
    assert [log["op"] for log in logs if "auto_batching_timeout" in log["event"]] == ["op"]


async def test_a_batch_waits_for_samples_in_earlier_ops(autojump_clock: trio.testing.MockClock) -> None:
    graph = text_graph("a<@", "b<a")
    graph.ops["a"].seconds = 1.0  # type: ignore[attr-defined] # of TextOp
    batches = _Batches()
    ops = {"a": OpSettings(concurrency=2), "b": OpSettings("b", batch_size=2, auto_batching_timeout=0)}
    async with open_executor(graph, settings(worker_num=100, ops=ops), hooks=batches) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.infer, asking())
            await trio.sleep(0.5)
            nursery.start_soon(executor.infer, asking())
        assert [0, 1] in batches.ids
        assert (await executor.infer(asking())).err_no == 0


async def test_each_sample_gets_its_own_rows(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(2, 50) as executor:
        answers = await infer_all(executor, "array 1,2", "array 3,4;5,6;8,9")
    assert len(_Rows.fed) == 1
    assert texts_of(answers) == [
        "[[[2.0, 4.0]], [1.0, 2.0], [0, 2]]",
        "[[[6.0, 8.0], [10.0, 12.0], [16.0, 18.0]], [3.0, 4.0, 5.0, 6.0, 8.0, 9.0], [0, 2, 4, 6]]",
    ]


async def test_samples_of_different_shapes_and_types_run_apart(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(6, 50) as executor:
        answers = await infer_all(
            executor, "array 1,2", "array 1", "text a,b", "list 3;4", "skip 5", "array 8,9"
        )  # fmt: skip
    assert _Rows.fed == [[[1.0, 2.0], [8.0, 9.0]], [[1.0]], ["a", "b"], [[3.0]], [[4.0]]]
    assert texts_of(answers) == [
        "[[[2.0, 4.0]], [1.0, 2.0], [0, 2]]",
        "[[[2.0]], [1.0], [0, 1]]",
        "[['A', 'B']]",
        "[[[6.0]], [[8.0]]]",
        "[[[5.0]]]",
        "[[[16.0, 18.0]], [8.0, 9.0], [0, 2]]",
    ]


@pytest.mark.parametrize(
    ("bad", "answer", "error"),
    [("array 13", 10000, "13 is bad"), ("array 7", "[[1.0]]", ""), ("array 5.5", "[[[11.0]], [5.5], [0, 1]]", "")],
    ids=["process raises", "too few rows", "offsets that cannot be split"],
)
async def test_samples_of_a_failed_batch_run_again_one_by_one(
    autojump_clock: trio.testing.MockClock, bad: str, answer: Any, error: str
) -> None:
    async with opened(3, 50) as executor:
        answers = await infer_all(executor, "array 1", bad, "array 3")
        assert texts_of(answers) == ["[[[2.0]], [1.0], [0, 1]]", answer, "[[[6.0]], [3.0], [0, 1]]"]
        assert error in answers[1][1].err_msg


async def test_a_late_batch_is_late_for_each_of_its_samples(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(2, 50, timeout=100, retry=2) as executor:
        answers = await infer_all(executor, "array 1", "array 99")
        assert [(seconds, response.err_no) for seconds, response in answers] == [(0.2, 6000)] * 2
        assert texts_of(await infer_all(executor, "array 1", "array 2"))[0] == "[[[2.0]], [1.0], [0, 1]]"


async def test_the_sample_of_a_caller_that_leaves_is_removed(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(2, 10_000) as executor:
        with trio.move_on_after(1):
            await executor.infer(asking("array 1"))
        answers = await infer_all(executor, "array 2", "array 3")
        assert [seconds for seconds, _ in answers] == [0.0, 0.0]
    assert _Rows.fed == [[[2.0], [3.0]]]


async def test_a_stuck_thread_delays_no_other_sample_of_its_batch() -> None:
    def process(_: Op, feeds: Any) -> Any:
        if "stuck" in feeds[0]:
            trio.from_thread.run(trio.sleep, 4.0)
        return dict(feeds[0])

    # Feeds with different names do not run together.
    stuck = op_class(
        preprocess=lambda _, inputs: {inputs["@DAGExecutor"]["x"]: np.zeros((1, 1))},
        process=process,
        postprocess=lambda _, inputs, fetched: {"x": " ".join(fetched)},
    )
    async with opened(2, 1_000_000, op=stuck, timeout=500) as executor:
        with trio.fail_after(WAIT_SECONDS):
            assert texts_of(await infer_all(executor, "fine", "stuck")) == ["fine", 6000]
            assert texts_of(await infer_all(executor, "b", "c")) == ["b", "c"]
