"""Samples that run together: when batches leave, what is merged and split, and what one of them costs the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from ovmstrio.ops import Op, PipelineResponse
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.executor import Executor, open_executor
from ovmstrio.runtimes.ops.observing.hooks import Several
from tests.support.ops import asking, settings, single, text_graph
from tests.support.waits import WAIT_SECONDS


class Rows(Op):
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
        return {"y": feed["x"] * 2, "flat": feed["x"].reshape(-1), "flat.lod": offsets}

    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        if isinstance(fetch_data, list):
            return {"x": str([one["y"].tolist() for one in fetch_data])}
        return {"x": str([value if isinstance(value, list) else value.tolist() for value in fetch_data.values()])}


class Batches(Several):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[list[int]] = []

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        self.ids.append(list(data_ids))


@asynccontextmanager
async def opened(
    batch_size: int, wait: int, *, worker_num: int = 100, op: type[Op] = Rows, hooks: Batches | None = None, **more: Any
) -> AsyncIterator[Executor]:
    """Open a pipeline of one Op that joins samples."""
    Rows.fed.clear()
    one = OpSettings("op", batch_size=batch_size, auto_batching_timeout=wait, **more)
    pipeline = settings(worker_num=worker_num, ops={"op": one})
    async with open_executor(single(op), pipeline, hooks=hooks or Batches()) as executor:
        yield executor


async def asked(executor: Executor, *texts: str, pause: float = 0.0) -> list[tuple[float, PipelineResponse]]:
    """Ask several things at once, or one after a pause after the other; gives when each was answered, and how."""
    found: dict[int, tuple[float, PipelineResponse]] = {}
    begin = trio.current_time()

    async def ask(number: int, text: str) -> None:
        response = await executor.infer(asking(text))
        found[number] = (round(trio.current_time() - begin, 6), response)

    async with trio.open_nursery() as nursery:
        for number, text in enumerate(texts):
            nursery.start_soon(ask, number, text)
            await wait_all_tasks_blocked()
            await trio.sleep(pause)
    return [found[number] for number in range(len(texts))]


def texts_of(answers: list[tuple[float, PipelineResponse]]) -> list[Any]:
    """Give the values of answers, or their codes."""
    return [response.err_no or response.values[0] for _, response in answers]


async def test_a_full_batch_leaves_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Nobody waits any longer than until there are enough."""
    async with opened(4, 500) as executor:
        answers = await asked(executor, *["array 1"] * 4)
    assert [seconds for seconds, _ in answers] == [0.0] * 4
    assert len(Rows.fed) == 1


async def test_one_that_stays_alone_leaves_when_its_time_is_over(autojump_clock: trio.testing.MockClock) -> None:
    """It has waited from its own arrival on."""
    async with opened(4, 500) as executor:
        await trio.sleep(0.3)
        ((seconds, _),) = await asked(executor, "array 1")
    assert seconds == 0.5


async def test_later_ones_do_not_make_the_first_wait_longer(autojump_clock: trio.testing.MockClock) -> None:
    """The window begins with the first sample."""
    async with opened(4, 500) as executor:
        answers = await asked(executor, *["array 1"] * 3, pause=0.2)
    assert [seconds for seconds, _ in answers] == [0.5] * 3


async def test_without_a_time_batches_leave_when_nobody_else_is_on_the_way(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """However much room there is: they wait for others a moment, and are warned of at the start."""
    with capture_logs() as logs:
        async with opened(3, 0) as executor:
            (alone,) = await asked(executor, "array 1")
            both = await asked(executor, *["array 1"] * 2)
            full = await asked(executor, *["array 1"] * 3)
    assert alone[0] == pytest.approx(0.01)
    assert [seconds for seconds, _ in both] == [pytest.approx(0.01)] * 2
    assert [seconds for seconds, _ in full] == [0.0] * 3
    assert [len(fed) for fed in Rows.fed] == [1, 2, 3]
    assert [log["op"] for log in logs if "auto_batching_timeout" in log["event"]] == ["op"]


async def test_a_batch_waits_for_those_that_are_still_at_work(autojump_clock: trio.testing.MockClock) -> None:
    """One that waits is joined by one that an Op before still works on, and leaves alone where there is none."""
    graph = text_graph("a<@", "b<a")
    slow = graph.ops["a"]
    slow.seconds = 1.0  # type: ignore[attr-defined] # of TextOp
    seen = Batches()
    ops = {"a": OpSettings(concurrency=2), "b": OpSettings("b", batch_size=2, auto_batching_timeout=0)}
    async with open_executor(graph, settings(worker_num=100, ops=ops), hooks=seen) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.infer, asking())
            await trio.sleep(0.5)
            nursery.start_soon(executor.infer, asking())
        assert [0, 1] in seen.ids
        assert (await executor.infer(asking())).err_no == 0


async def test_batches_that_can_never_become_full_leave(autojump_clock: trio.testing.MockClock) -> None:
    """With less room for requests than a batch has, it runs as soon as all that have come wait for it."""
    async with opened(8, 0, worker_num=3) as executor:
        answers = await asked(executor, *["array 1"] * 3)
    assert [seconds for seconds, _ in answers] == [0.0] * 3


async def test_batches_are_never_larger_than_they_may_be(autojump_clock: trio.testing.MockClock) -> None:
    """What is more waits for the next batch; observers are told of all samples of each, the oldest first."""
    hooks = Batches()
    async with opened(3, 50, hooks=hooks) as executor:
        await asked(executor, *[f"array {number}" for number in range(20, 28)])
    assert hooks.ids == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [len(rows) for rows in Rows.fed] == [3, 3, 2]


async def test_each_gets_its_own_rows(autojump_clock: trio.testing.MockClock) -> None:
    """Of every output, and where there are offsets, the part that belongs to its rows, from nothing on."""
    async with opened(2, 50) as executor:
        answers = await asked(executor, "array 1,2", "array 3,4;5,6;8,9")
    assert len(Rows.fed) == 1
    assert texts_of(answers) == [
        "[[[2.0, 4.0]], [1.0, 2.0], [0, 2]]",
        "[[[6.0, 8.0], [10.0, 12.0], [16.0, 18.0]], [3.0, 4.0, 5.0, 6.0, 8.0, 9.0], [0, 2, 4, 6]]",
    ]


async def test_what_does_not_fit_together_runs_apart(autojump_clock: trio.testing.MockClock) -> None:
    """Other shapes, texts, lists and what skips the model: each is answered, out of one batch."""
    async with opened(6, 50) as executor:
        answers = await asked(
            executor, "array 1,2", "array 1", "text a,b", "list 3;4", "skip 5", "array 8,9"
        )  # fmt: skip
    assert Rows.fed == [[[1.0, 2.0], [8.0, 9.0]], [[1.0]], ["a", "b"], [[3.0]], [[4.0]]]
    assert texts_of(answers) == [
        "[[[2.0, 4.0]], [1.0, 2.0], [0, 2]]",
        "[[[2.0]], [1.0], [0, 1]]",
        "[['A', 'B']]",
        "[[[6.0]], [[8.0]]]",
        "[[[5.0]]]",
        "[[[16.0, 18.0]], [8.0, 9.0], [0, 2]]",
    ]


async def test_an_error_costs_only_the_sample_whose_it_is(autojump_clock: trio.testing.MockClock) -> None:
    """A batch that fails runs again one by one; so does one whose outputs cannot be told apart."""
    async with opened(3, 50) as executor:
        answers = await asked(executor, "array 1", "array 13", "array 3")
        assert texts_of(answers) == ["[[[2.0]], [1.0], [0, 1]]", 10000, "[[[6.0]], [3.0], [0, 1]]"]
        assert "13 is bad" in answers[1][1].err_msg
        assert texts_of(await asked(executor, "array 1", "array 7", "array 3"))[::2] == texts_of(answers)[::2]


async def test_a_batch_that_is_late_is_late_for_all_of_it(autojump_clock: trio.testing.MockClock) -> None:
    """Those who were in it get 6000, the next batch runs."""
    async with opened(2, 50, timeout=100, retry=2) as executor:
        answers = await asked(executor, "array 1", "array 99")
        assert [(seconds, response.err_no) for seconds, response in answers] == [(0.2, 6000)] * 2
        assert texts_of(await asked(executor, "array 1", "array 2"))[0] == "[[[2.0]], [1.0], [0, 1]]"


async def test_who_leaves_takes_its_sample_along(autojump_clock: trio.testing.MockClock) -> None:
    """Its place in the batch is another's."""
    async with opened(2, 10_000) as executor:
        with trio.move_on_after(1):
            await executor.infer(asking("array 1"))
        answers = await asked(executor, "array 2", "array 3")
        assert [seconds for seconds, _ in answers] == [0.0, 0.0]
    assert Rows.fed == [[[2.0], [3.0]]]


class StuckApart(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        text = input_dicts["@DAGExecutor"]["x"]
        return {text: np.zeros((1, 1))}

    def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        if "stuck" in feed_batch[0]:
            trio.from_thread.run(trio.sleep, 4.0)
        return dict(feed_batch[0])

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": " ".join(fetch_data)}


async def test_a_thread_that_is_stuck_does_not_hold_the_rest_of_its_batch() -> None:
    """The others are answered as soon as the attempts of the one that is stuck are over."""
    async with opened(2, 1_000_000, op=StuckApart, timeout=500) as executor:
        with trio.fail_after(WAIT_SECONDS):
            assert texts_of(await asked(executor, "fine", "stuck")) == ["fine", 6000]
            assert texts_of(await asked(executor, "b", "c")) == ["b", "c"]


async def test_several_workers_have_batches_of_their_own(autojump_clock: trio.testing.MockClock) -> None:
    """They run at the same time."""
    Rows.seconds = 1.0
    try:
        async with opened(2, 50, concurrency=2) as executor:
            answers = await asked(executor, *["array 1"] * 4)
    finally:
        Rows.seconds = 0.0
    assert [seconds for seconds, _ in answers] == [1.0] * 4


@pytest.mark.parametrize("batch_size", [1, 4])
async def test_a_thousand_requests_get_their_own_answers(
    autojump_clock: trio.testing.MockClock, batch_size: int
) -> None:
    """Whoever waits for how long, each answer is its request's."""
    async with opened(batch_size, 5, concurrency=3) as executor:
        answers: dict[int, str] = {}

        async def ask(number: int) -> None:
            await trio.sleep(number % 7 / 100)
            (answers[number],) = (await executor.infer(asking(f"array {number}"))).values

        async with trio.open_nursery() as nursery:
            for number in range(1000, 2000):
                nursery.start_soon(ask, number)
    assert answers == {number: f"[[[{2.0 * number}]], [{float(number)}], [0, 1]]" for number in range(1000, 2000)}
