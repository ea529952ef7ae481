from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Self

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.ext.ops import Op, PipelineRequest, PipelineResponse, RequestOp, ResponseOp
from ovmstrio.ops.executor import Executor, open_executor
from ovmstrio.ops.graph import OpGraph, build
from ovmstrio.ops.messages import from_array
from ovmstrio.ops.settings import OpSettings
from tests.support.ops import asking, infer_until_deadline, op_class, settings, text_graph
from tests.support.pipelines import gather
from tests.support.waits import WAIT_SECONDS


class Release:
    """Release of hooks that would not end by themselves, at the latest at the end of its block; one per test."""

    def __init__(self) -> None:
        self.threads = threading.Event()
        self.tasks = trio.Event()
        self.held = 0

    async def hold(self) -> None:
        self.held += 1
        await self.tasks.wait()

    def __call__(self) -> None:
        self.threads.set()
        self.tasks.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self()


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("text")


class _Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise SystemExit(6)


def _raise(error: BaseException) -> Any:
    raise error


def _cyclic() -> dict[str, Any]:
    output: dict[str, Any] = {"x": "cyclic"}
    output["self"] = output
    return output


DEEDS: Final[Mapping[str, Callable[[], Any]]] = {
    "raise": lambda: _raise(ValueError("no")),
    "exit": lambda: _raise(SystemExit(3)),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "generator": lambda: _raise(GeneratorExit()),
    "base": lambda: _raise(BaseException("no")),
    "group": lambda: _raise(BaseExceptionGroup("no", [SystemExit(1)])),
    "unprintable": lambda: _raise(_UnprintableError()),
    "none": lambda: None,
    "number": lambda: 7,
    "pair": lambda: ({"x": "pair"}, 1),
    "five": lambda: (1, 2, 3, 4, 5),
    "code": lambda: ({"x": "code"}, False, object(), object()),
    "object": object,
    "uncopied": lambda: {"x": "uncopied", "y": _Uncopied()},
    "lock": lambda: {"x": "lock", "y": threading.Lock()},
    "cyclic": _cyclic,
    "odd array": lambda: {"x": np.array([object()], object)},
    "odd keys": lambda: {1: "x", None: "y"},
}
"""Actions of a hook, by the text of the request."""

ASYNC_DEEDS: Final = sorted(set(DEEDS) - {"interrupt"})
"""Those of a hook on the loop, where an interrupt is one of the server."""


class Hostile(Op):
    """Op whose hook ``where`` does in a thread what the text of the request says."""

    where: str = "preprocess"
    release: Release

    def do(self, hook: str, values: Any) -> Any:
        text = str(next(iter(values.values()), "")) if isinstance(values, dict) else ""
        if hook != self.where or self.name not in {"a", "op"}:
            return None
        if text == "wait":
            self.release.threads.wait(60)
        return (DEEDS[text](),) if text in DEEDS else None

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        first = next(iter(input_dicts.values()))
        done = self.do("preprocess", first)
        mine = dict(first)
        first.clear()
        return mine if done is None else done[0]

    def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        done = self.do("process", feed_batch[0])
        mine = dict(feed_batch[0])
        feed_batch[0].clear()
        return mine if done is None else done[0]

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        done = self.do("postprocess", fetch_data)
        return fetch_data if done is None else done[0]


class AsyncHostile(Hostile):
    """Op that does the same on the loop, and ignores cancellation where it waits."""

    async def _wait(self, hook: str, values: Any) -> None:
        waits = isinstance(values, dict) and values.get("x") == "wait"
        if waits and hook == self.where and self.name in {"a", "op"}:
            with trio.CancelScope(shield=True):
                await self.release.hold()

    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        await self._wait("preprocess", next(iter(input_dicts.values())))
        return super().preprocess(input_dicts, data_id, log_id)

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        await self._wait("process", feed_batch[0])
        return super().process(feed_batch, typical_logid)

    async def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        await self._wait("postprocess", fetch_data)
        return super().postprocess(input_dicts, fetch_data, data_id, log_id)


class StubbornRequest(RequestOp):
    release: Release

    async def unpack_request_package(self, request: Any) -> Any:
        if request.values == ["unpack"]:
            with trio.CancelScope(shield=True):
                await self.release.hold()
        return super().unpack_request_package(request)


class StubbornResponse(ResponseOp):
    release: Release

    async def pack_response_package(self, channeldata: Any) -> PipelineResponse:
        if channeldata.parse().get("x") == "pack":
            with trio.CancelScope(shield=True):
                await self.release.hold()
        packed: PipelineResponse = super().pack_response_package(channeldata)
        return packed


HOOKS = ["preprocess", "process", "postprocess"]
SHAPES = {"chain": ["a<@", "b<a"], "diamond": ["a<@", "b<@", "c<a b"], "fork": ["a<@", "b<a", "c<a", "d<b c"]}


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[Release]:
    monkeypatch.setattr("ovmstrio.ops.executor.workers.GRACE_SECONDS", 0.01)
    made = Release()
    monkeypatch.setattr(Hostile, "release", made, raising=False)
    yield made
    made.threads.set()


async def infer(executor: Executor, text: str, seconds: float = WAIT_SECONDS) -> PipelineResponse:
    with trio.fail_after(seconds + 20):
        return await executor.infer(asking(text), trio.current_time() + seconds)


async def infer_all(executor: Executor, *texts: str) -> dict[str, PipelineResponse]:
    return dict(zip(texts, await gather(partial(infer, executor), texts), strict=True))


def hostile(shape: str, where: str, make: type[Op] = Hostile) -> OpGraph:
    """Build a pipeline whose Op ``a`` does what requests say."""
    graph = text_graph(*SHAPES[shape], make=make)
    for op in graph.ops.values():
        op.where = where  # type: ignore[attr-defined] # of Hostile
    return graph


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("where", HOOKS)
@pytest.mark.parametrize("make", [Hostile, AsyncHostile])
async def test_requests_end_whatever_hooks_do(release: Release, make: type[Op], where: str, batch_size: int) -> None:
    one = OpSettings(batch_size=batch_size, auto_batching_timeout=5)
    for shape in SHAPES:
        graph = hostile(shape, where, make)
        async with open_executor(graph, settings(channel_size=1, ops=dict.fromkeys("abcd", one))) as executor:
            with capture_logs():
                answers = await infer_all(executor, *(DEEDS if make is Hostile else ASYNC_DEEDS), "fine")
            assert answers["fine"].values == ["fine"]
            if where != "process":
                raising = ("raise", "exit", "generator", "base", "group", "unprintable")
                assert {answers[text].err_no for text in raising} == {10000}
            assert (await infer(executor, "fine")).values == ["fine"]
            assert executor.in_flight == 0


@pytest.mark.parametrize("where", HOOKS)
async def test_a_hook_that_ignores_its_cancellation_costs_only_its_own_request(release: Release, where: str) -> None:
    graph = hostile("chain", where, AsyncHostile)
    async with open_executor(graph, settings()) as executor, release:
        assert (await infer(executor, "wait", 0.05)).err_no == 6000
        assert (await infer(executor, "fine")).values == ["fine"]


async def test_an_attempt_that_ignores_its_cancellation_has_its_limit(
    release: Release, autojump_clock: MockClock
) -> None:
    graph = hostile("chain", "process", AsyncHostile)
    ops = {"a": OpSettings(timeout=20, retry=3)}
    async with open_executor(graph, settings(ops=ops)) as executor, release:
        response = await infer(executor, "wait")
        assert (response.err_no, "3 attempts of 0.02 s" in response.err_msg) == (6000, True)
        release()
        assert (await infer(executor, "fine")).values == ["fine"]


async def test_attempts_that_never_end_release_their_threads(release: Release, mock_clock: MockClock) -> None:
    graph = hostile("chain", "process")
    ops = {"a": OpSettings(timeout=1, retry=200)}
    mock_clock.rate = 0.25
    async with open_executor(graph, settings(ops=ops)) as executor, release:
        assert (await infer(executor, "wait")).err_no == 6000
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        release()
        assert (await infer(executor, "fine")).values == ["fine"]


async def test_stuck_package_hooks_cost_only_their_own_requests(
    release: Release, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.ops.executor.executor.MIN_PACK_SECONDS", 0.2)
    read = StubbornRequest()
    read.release = release
    answer = StubbornResponse(input_ops=Op(input_ops=read))
    answer.release = release
    async with open_executor(build(answer), settings(worker_num=1)) as executor, release:
        response = await infer_until_deadline(executor, lambda: release.held == 1, mock_clock, "unpack")
        assert response.err_no == 6000
        assert (await infer(executor, "fine")).values == ["fine"]
        response = await infer_until_deadline(executor, lambda: release.held == 2, mock_clock, "pack")
        assert response.err_no == 6000
        assert "2 hooks of the RequestOp or the ResponseOp do not end" in (await infer(executor, "fine")).err_msg
        release()
        await wait_all_tasks_blocked()
        assert (await infer(executor, "fine")).values == ["fine"]


async def test_a_pipeline_that_closes_waits_for_no_hook(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ovmstrio.ops.executor.executor.MIN_PACK_SECONDS", 0.3)
    read = StubbornRequest()
    response = StubbornResponse(input_ops=AsyncHostile(name="op", input_ops=read))
    read.release = response.release = release
    answers: dict[str, PipelineResponse] = {}

    async def infer_stuck() -> None:
        answers.update(await infer_all(executor, "unpack", "pack", "wait"))

    pipeline = settings(worker_num=4, ops={"op": OpSettings(concurrency=3)})
    async with open_executor(build(response), pipeline) as executor, release, trio.open_nursery() as nursery:
        nursery.start_soon(infer_stuck)
        await wait_all_tasks_blocked(0.01)
        await executor.aclose(0.02)
        await wait_all_tasks_blocked()
        assert {text: one.err_no for text, one in answers.items()} == {"unpack": 3001, "wait": 3001, "pack": 6000}


async def test_inputs_that_arrive_while_another_is_copied_run_no_op_twice() -> None:
    runs: list[tuple[str, int]] = []

    def pass_on(op: Op, inputs: Mapping[str, Any], data_id: int) -> Any:
        runs.append((op.name, data_id))
        return dict(next(iter(inputs.values())))

    def write(op: Op, inputs: Any, output: Any) -> Any:
        return {"x": str(output["x"][0])} if op.name == "e" else output

    edges = ("a<@", "b<@", "c<a b", "d<a b", "e<c d")
    graph = text_graph(*edges, make=op_class(preprocess=pass_on, postprocess=write))
    request = PipelineRequest(tensors=[from_array("x", np.full(400_000, 7.0))])
    async with open_executor(graph, settings(channel_recv_frist_arrive=True)) as executor:
        for _ in range(10):
            response = await executor.infer(request)
            assert (response.err_no, response.values) == (0, ["7.0"]), response.err_msg
    assert {runs.count((op, data_id)) for op in "cd" for data_id in range(10)} <= {0, 1}
