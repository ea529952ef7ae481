from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.ops import (
    Op,
    PipelineRequest,
    PipelineResponse,
)
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.executor import Executor, open_executor
from ovmstrio.runtimes.ops.graph import OpGraph
from tests.support.ops import TextOp, asking, infer_until_deadline, settings, single, text_graph
from tests.support.waits import Gate


def answered(response: PipelineResponse) -> Any:
    """Give the only value of an answer, or its error."""
    return response.values[0] if not response.err_no else (response.err_no, response.err_msg)


async def asked(graph: OpGraph, *, request: PipelineRequest | None = None, **dag: Any) -> PipelineResponse:
    """Open a pipeline for one request."""
    async with open_executor(graph, settings(**dag)) as executor:
        return await executor.infer(request or asking())


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        (["a<@"], "a(x)"),
        (["a<@", "b<a", "c<b"], "c(b(a(x)))"),
        (["a<@", "b<a", "c<a", "d<b c"], "d(b(a(x)),c(a(x)))"),
        (["a<@", "b<a", "c<b", "d<a c"], "d(a(x),c(b(a(x))))"),
        (["a<@", "b<a", "c<b", "d<@ a c"], "d(x,a(x),c(b(a(x))))"),
        (["a<@", "b<a", "c<a", "d<a", "e<d b c"], "e(d(a(x)),b(a(x)),c(a(x)))"),
        (["a<@", "b<@", "c<b", "d<a c"], "d(a(x),c(b(x)))"),
    ],
)
async def test_outputs_flow_along_every_edge(
    autojump_clock: trio.testing.MockClock, edges: list[str], expected: str
) -> None:
    """Each Op gets the outputs of all its inputs, in their order, whatever the lengths of the branches."""
    assert answered(await asked(text_graph(*edges))) == expected


class Keys(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": " ".join(input_dicts)}


async def test_inputs_are_named_after_the_ops_they_come_from() -> None:
    """The RequestOp's output is ``@DAGExecutor``, all others have their Op's name."""
    assert answered(await asked(text_graph("a<@", make=Keys))) == "@DAGExecutor"
    assert answered(await asked(text_graph("a<@", "b<@", "c<a b @", make=Keys))) == "a b @DAGExecutor"


class Changing(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        values = [value for one in input_dicts.values() for value in one.get("list", [])]
        for one in input_dicts.values():
            one.setdefault("list", []).append(self.name)
        return {"list": [*values, self.name]}

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": " ".join(fetch_data["list"])} if self.name == "d" else fetch_data


async def test_each_consumer_has_a_copy_of_its_own() -> None:
    """What one branch changes in its input is not seen by another."""
    graph = text_graph("a<@", "b<a", "c<a", "d<b c", make=Changing)
    assert (await asked(graph)).values == ["a b a c d"]


async def test_a_slow_branch_holds_only_its_own_request(autojump_clock: trio.testing.MockClock) -> None:
    """A join waits for its slowest input, and branches run at the same time."""
    graph = text_graph("a<@", "b<@", "c<a b")
    graph.ops["a"].seconds, graph.ops["b"].seconds = 3.0, 2.0  # type: ignore[attr-defined] # of TextOp
    begin = trio.current_time()
    assert answered(await asked(graph)) == "c(a(x),b(x))"
    assert trio.current_time() - begin == pytest.approx(3.0)


class Failing(TextOp):
    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        await trio.sleep(self.seconds)
        text = next(iter(input_dicts.values()))["x"]
        if self.name in text:
            raise RuntimeError(f"it's {self.name}")
        return {"x": text}


async def test_the_first_failure_answers_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """The other branch is not waited for, and nothing of the request is left in the pipeline."""
    graph = text_graph("a<@", "b<@", "c<a b", make=Failing)
    graph.ops["a"].seconds, graph.ops["b"].seconds = 1.0, 50.0  # type: ignore[attr-defined] # of Failing
    async with open_executor(graph, settings()) as executor:
        begin = trio.current_time()
        response = await executor.infer(asking("a", logid=7))
        assert trio.current_time() - begin == pytest.approx(1.0)
        where = "ClassName: Op._run_preprocess.<locals>.preprocess_help  FunctionName: preprocess_help"
        assert answered(response) == (10000, f"Log_id: 7  Raise_msg: its a  {where}")
        assert [channel.size for channel in executor.channels()] == [0, 0, 0, 0]
        assert executor.in_flight == 0
        assert (await executor.infer(asking("x"))).err_no == 0


async def test_the_first_arrival_is_enough_if_it_is_said(autojump_clock: trio.testing.MockClock) -> None:
    """With ``channel_recv_frist_arrive`` the faster branch answers, and requests that are overtaken are not lost."""
    graph = text_graph("a<@", "b<@", "c<a b")
    graph.ops["a"].seconds, graph.ops["b"].seconds = 5.0, 1.0  # type: ignore[attr-defined] # of TextOp
    answers = []
    one = OpSettings(concurrency=20)
    async with (
        open_executor(graph, settings(channel_recv_frist_arrive=True, ops=dict.fromkeys("abc", one))) as executor,
        trio.open_nursery() as nursery,
    ):

        async def ask(number: int) -> None:
            answers.append(answered(await executor.infer(asking(str(number)))))

        for number in range(20):
            nursery.start_soon(ask, number)
    assert sorted(answers) == sorted(f"c(b({number}))" for number in range(20))


@pytest.mark.parametrize(("slow", "code"), [(5.0, 0), (1.0, 10000)])
async def test_what_fails_after_it_was_overtaken_does_not_matter(
    autojump_clock: trio.testing.MockClock, slow: float, code: int
) -> None:
    """A branch that the join has gone on without may fail anywhere; one that fails before that is the answer."""
    graph = text_graph("a<@", "b<a", "c<@", "d<b c", "e<d", make=Failing)
    for name, seconds in zip("ace", (slow, 2.0, 9.0), strict=True):
        graph.ops[name].seconds = seconds  # type: ignore[attr-defined] # of Failing
    async with open_executor(graph, settings(channel_recv_frist_arrive=True)) as executor:
        assert (await executor.infer(asking("a"))).err_no == code


async def test_a_thousand_requests_get_their_own_answers(autojump_clock: trio.testing.MockClock) -> None:
    """Through a diamond whose Ops take their time, many at once."""
    randomly = random.Random(0)

    class Strolling(TextOp):
        async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
            self.seconds = randomly.random()
            return await super().preprocess(input_dicts)

    graph = text_graph("a<@", "b<a", "c<a", "d<b c", make=Strolling)
    answers: dict[int, Any] = {}
    many = dict.fromkeys("abcd", OpSettings(concurrency=50))
    async with (
        open_executor(graph, settings(worker_num=1000, channel_size=7, ops=many)) as executor,
        trio.open_nursery() as nursery,
    ):

        async def ask(number: int) -> None:
            answers[number] = answered(await executor.infer(asking(str(number))))

        for number in range(1000):
            nursery.start_soon(ask, number)
    assert answers == {number: f"d(b(a({number})),c(a({number})))" for number in range(1000)}


class Counting(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (one,) = input_dicts.values()
        return {"x": one["x"] + "+"}

    def check_jumping(self, postprocessed_batch: Any) -> bool:
        (data,) = postprocessed_batch.values()
        return len(data.parse()["x"]) < 8


async def test_a_jump_runs_a_loop_of_ops_again() -> None:
    """The consumers of the Op that is jumped to get the output, until the jump is not made."""
    graph = text_graph("a<@", "b<a", "c<b", make=Counting, jumps={"c": "a"})
    assert answered(await asked(graph)) == "x+++++++"


class Restless(Counting):
    def check_jumping(self, postprocessed_batch: Any) -> bool:
        return True


async def test_a_loop_that_never_ends_is_ended() -> None:
    """A request may jump a thousand times."""
    code, text = answered(await asked(text_graph("a<@", "b<a", make=Restless, jumps={"b": "a"})))
    assert (code, text) == (10000, "Op b has jumped 1000 times for one request, as often as it may")


async def test_a_full_channel_holds_back_and_nothing_hangs(autojump_clock: trio.testing.MockClock) -> None:
    """A diamond with channels of one answers every one of many requests with its own text."""
    graph = text_graph("a<@", "b<a", "c<a", "d<b c")
    for name, seconds in zip("abcd", (0.01, 0.2, 0.05, 0.1), strict=True):
        graph.ops[name].seconds = seconds  # type: ignore[attr-defined] # of TextOp
    answers: dict[int, Any] = {}
    sizes = []
    async with open_executor(graph, settings(channel_size=1)) as executor, trio.open_nursery() as nursery:

        async def ask(number: int) -> None:
            answers[number] = answered(await executor.infer(asking(str(number))))
            sizes.append(
                max(channel.size for channel in executor.channels() if "@DAGExecutor" not in channel.producers)
            )

        for number in range(100):
            nursery.start_soon(ask, number)
    assert answers == {number: f"d(b(a({number})),c(a({number})))" for number in range(100)}
    assert max(sizes) == 1


async def test_older_requests_go_first(autojump_clock: trio.testing.MockClock) -> None:
    """An Op that is free takes the oldest request that waits for it, not the one that came first."""

    class Noting(TextOp):
        order: list[str] = []  # noqa: RUF012 - shared by the copies of the workers

        async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
            (one,) = input_dicts.values()
            await trio.sleep(float(one["x"]) if self.name == "a" else 10)
            if self.name == "b":
                self.order.append(one["x"])
            return dict(one)

    graph = text_graph("a<@", "b<a", make=Noting)
    async with (
        open_executor(graph, settings(ops={"a": OpSettings(concurrency=5)})) as executor,
        trio.open_nursery() as nursery,
    ):
        for seconds in ("5", "4", "3", "2", "1"):
            nursery.start_soon(executor.infer, asking(seconds))
            await trio.testing.wait_all_tasks_blocked()
    assert Noting.order == ["1", "5", "4", "3", "2"]


async def test_worker_num_requests_are_let_in(autojump_clock: trio.testing.MockClock) -> None:
    """The others wait in order; more than ``max_queue`` are refused, and the answer tells that it is the load."""
    graph = text_graph("a<@")
    graph.ops["a"].seconds = 1.0  # type: ignore[attr-defined] # of TextOp
    ends: list[tuple[float, int, bool]] = []
    async with (
        open_executor(graph, settings(worker_num=2, max_queue=3, ops={"a": OpSettings(concurrency=9)})) as executor,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            response = await executor.infer(asking())
            ends.append((trio.current_time(), response.err_no, response.is_overload))

        begin = trio.current_time()
        for _ in range(6):
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
    assert [(round(end - begin), *rest) for end, *rest in ends] == [
        (0, 3002, True), (1, 0, False), (1, 0, False), (2, 0, False), (2, 0, False), (3, 0, False),
    ]  # fmt: skip


async def test_a_deadline_answers_with_6000(autojump_clock: trio.testing.MockClock) -> None:
    """Whether the request waits for its turn, for an Op or for a batch."""
    graph = text_graph("a<@")
    graph.ops["a"].seconds = 1e6  # type: ignore[attr-defined] # of TextOp
    async with open_executor(graph, settings(worker_num=1)) as executor, trio.open_nursery() as nursery:
        codes = []

        async def ask(seconds: float) -> None:
            codes.append((await executor.infer(asking(), trio.current_time() + seconds)).err_no)

        nursery.start_soon(ask, 5)
        nursery.start_soon(ask, 3)
    assert codes == [6000, 6000]
    limited = settings(request_timeout=2000)
    async with open_executor(graph, limited) as executor:
        begin = trio.current_time()
        assert (await executor.infer(asking())).err_no == 6000
        assert trio.current_time() - begin == pytest.approx(2.0)


async def test_a_caller_that_leaves_frees_its_place(autojump_clock: trio.testing.MockClock) -> None:
    """Its place in the pipeline and its worker go to the next request at once."""
    graph = text_graph("a<@")
    graph.ops["a"].seconds = 10.0  # type: ignore[attr-defined] # of TextOp
    async with open_executor(graph, settings(worker_num=1)) as executor:
        begin = trio.current_time()
        with trio.move_on_after(1) as scope:
            await executor.infer(asking())
        assert scope.cancelled_caught
        assert answered(await executor.infer(asking("next"))) == "a(next)"
        assert trio.current_time() - begin == pytest.approx(11.0)


async def test_a_pipeline_that_closes_answers_everyone(autojump_clock: trio.testing.MockClock) -> None:
    """Who is inside gets time to end, who goes on after it and who waits gets 3001."""
    graph = text_graph("a<@")
    answers: list[Any] = []
    async with trio.open_nursery() as nursery:

        async def ask(executor: Executor) -> None:
            answers.append(answered(await executor.infer(asking())))

        for seconds in (4.0, 40.0):
            graph.ops["a"].seconds = seconds  # type: ignore[attr-defined] # of TextOp
            async with open_executor(graph, settings(worker_num=1), grace_seconds=5) as executor:
                nursery.start_soon(ask, executor)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(ask, executor)
                await trio.testing.wait_all_tasks_blocked()
            assert executor.obstacle() == "the pipeline is closed"
            answers.append(answered(await executor.infer(asking())))
    closed = (3001, "dag closed.")
    assert answers == [closed, "a(x)", closed, closed, closed, closed]


class Prepared(Op):
    made: list[Any] = []  # noqa: RUF012 - shared by the copies of the workers

    def init_op(self) -> None:
        self.mine = object()
        self.made.append((self.concurrency_idx, self.mine))


async def test_each_worker_has_a_copy_of_the_op() -> None:
    """``init_op`` runs once a worker, which knows its number, and what it sets is the worker's own."""
    Prepared.made.clear()
    async with open_executor(single(Prepared, concurrency=3), settings()) as executor:
        assert executor.obstacle() == ""
        assert sorted(index for index, _ in Prepared.made) == [0, 1, 2]
        assert len({mine for _, mine in Prepared.made}) == 3


class Unprepared(Op):
    def init_op(self) -> None:
        raise OSError("no such dictionary")


class AsyncUnprepared(Op):
    async def init_op(self) -> None:
        raise OSError("no such dictionary")


@pytest.mark.parametrize("op", [Unprepared, AsyncUnprepared])
async def test_an_init_op_that_raises_ends_the_start(op: type[Op]) -> None:
    """The error has the Op and the traceback."""
    with pytest.raises(ConfigError, match="init_op of Op op raised OSError: no such dictionary") as caught:
        async with open_executor(single(op), settings()):
            raise AssertionError("it was opened")
    assert 'raise OSError("no such dictionary")' in str(caught.value)


async def test_a_hook_that_takes_what_nobody_gives_ends_the_start() -> None:
    """Hooks are looked at before the first request."""

    class Greedy(Op):
        def preprocess(self, input_dicts: Any, data_id: int, log_id: int, more: int) -> Any:  # type: ignore[override] # the mistake
            return {}

    with pytest.raises(
        ConfigError, match=r"preprocess of Op op .*found preprocess.self, input_dicts, data_id, log_id, more"
    ):
        async with open_executor(single(Greedy), settings()):
            raise AssertionError("it was opened")


class Stuck(Op):
    release = Gate()
    entered = threading.Semaphore(0)

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (one,) = input_dicts.values()
        if one["x"] == "wait":
            self.entered.release()
            self.release.wait()
        return dict(one)


async def test_a_thread_that_does_not_end_costs_only_its_own_request(
    mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller is answered at its deadline, and the worker gets a new copy of the Op for the next request."""
    monkeypatch.setattr("ovmstrio.runtimes.ops.executor.workers.GRACE_SECONDS", 0.01)
    Stuck.release.clear()
    try:
        async with open_executor(single(Stuck), settings(worker_num=1)) as executor:
            for _ in range(3):
                assert (await infer_until_deadline(executor, Stuck.release.next_arrival(), mock_clock)).err_no == 6000
                assert answered(await executor.infer(asking("next"))) == "next"
    finally:
        Stuck.release.set()


class StuckProcess(Op):
    release = Gate()
    made: list[int] = []  # noqa: RUF012 - shared by the copies of the workers

    def init_op(self) -> None:
        self.made.append(1)

    def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        (feed,) = feed_batch
        if feed["x"] == "wait":
            self.release.wait()
        return dict(feed)


@pytest.fixture
def stuck() -> Iterator[type[StuckProcess]]:
    """Give the Op, and let its threads go on at the end."""
    StuckProcess.made.clear()
    StuckProcess.release.clear()
    yield StuckProcess
    StuckProcess.release.set()


async def test_a_worker_whose_process_goes_on_serves_the_next_request_at_once(
    mock_clock: trio.testing.MockClock, stuck: type[StuckProcess]
) -> None:
    """With the same copy of the Op, in a fresh thread."""
    async with open_executor(single(stuck), settings(worker_num=1)) as executor:
        for _ in range(3):
            assert (await infer_until_deadline(executor, stuck.release.next_arrival(), mock_clock)).err_no == 6000
            assert answered(await executor.infer(asking("next"))) == "next"
    assert len(stuck.made) == 1


async def test_many_threads_that_do_not_end_cost_the_copy_of_the_op(
    mock_clock: trio.testing.MockClock, stuck: type[StuckProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is an end of threads: the worker gets a new copy then, with threads of its own."""
    monkeypatch.setattr("ovmstrio.runtimes.ops.executor.workers.GRACE_SECONDS", 0.01)
    async with open_executor(single(stuck), settings(worker_num=1)) as executor:
        for made in (*[1] * 7, 2, 2):
            assert (await infer_until_deadline(executor, stuck.release.next_arrival(), mock_clock)).err_no == 6000
            assert answered(await executor.infer(asking("next"))) == "next"
            assert len(stuck.made) == made


class Mixing(Op):
    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        (one,) = input_dicts.values()
        self.text = one["x"]
        return {"other": "x"}

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": self.text}


async def test_state_of_a_worker_is_safe() -> None:
    """With several workers and many requests each one gets its own text."""
    answers: dict[str, Any] = {}
    graph = text_graph("a<@", "b<a", "c<b", make=Mixing)
    three = OpSettings(concurrency=3)
    async with (
        open_executor(graph, settings(ops=dict.fromkeys("abc", three))) as executor,
        trio.open_nursery() as nursery,
    ):

        async def ask(text: str) -> None:
            answers[text] = answered(await executor.infer(asking(text)))

        for number in range(200):
            nursery.start_soon(ask, str(number))
    assert answers == {str(number): str(number) for number in range(200)}
