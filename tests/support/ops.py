"""Ops, pipelines and their figures that tests of several parts need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import trio
from trio.testing import MockClock

from ovmstrio.ext.ops import Op, PipelineRequest, PipelineResponse, RequestOp, ResponseOp
from ovmstrio.ops.executor.executor import Executor
from ovmstrio.ops.graph import OpGraph, build
from ovmstrio.ops.observing.hooks import ChannelState
from ovmstrio.ops.observing.observers import PipelineCounters, snapshot
from ovmstrio.ops.settings import DagSettings, OpSettings, PipelineSettings
from tests.support.waits import until_async


class TextOp(Op):
    """Op on the loop that joins the texts of its inputs by its own name: ``b(a(x))``, ``d(b(x),c(x))``."""

    seconds: float = 0.0

    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        await trio.sleep(self.seconds)
        inner = ",".join(str(one["x"]) for one in input_dicts.values())
        return {"x": f"{self.name}({inner})"}


def op_class(**hooks: Callable[..., Any]) -> type[Op]:
    """Return a class of Op with the given hooks, whose first parameter is the Op."""
    return type("HookedOp", (Op,), hooks)


async def infer_until_deadline(
    executor: Executor, has_started: Callable[[], bool], clock: MockClock, text: str = "wait"
) -> PipelineResponse:
    """Request a hook that blocks, jump to the deadline once it has started, and return the answer."""
    answers: list[PipelineResponse] = []
    clock.rate = 1

    async def infer() -> None:
        answers.append(await executor.infer(asking(text), trio.current_time() + 1000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(infer)
        await until_async(has_started)
        clock.jump(1000)
    return answers[0]


def text_graph(*edges: str, make: Callable[..., Op] = TextOp, jumps: Mapping[str, str] | None = None) -> OpGraph:
    """Build ``"b<a"``, ``"d<b c"`` of Ops that a function makes; the last one named is the last Op, ``@`` the first."""
    ops: dict[str, Op] = {"@": RequestOp()}
    for edge in edges:
        name, _, producers = edge.partition("<")
        ops[name] = make(name=name, input_ops=[ops[one] for one in producers.split()])
    for name, target in (jumps or {}).items():
        ops[name].set_jump_to_ops(ops[target])
    return build(ResponseOp(input_ops=list(ops.values())[-1]))


def single(op: type[Op], **arguments: Any) -> OpGraph:
    return build(ResponseOp(input_ops=op(name="op", input_ops=RequestOp(), **arguments)))


def settings(*, worker_num: int = 100, ops: Mapping[str, OpSettings] | None = None, **dag: Any) -> PipelineSettings:
    return PipelineSettings(worker_num=worker_num, dag=DagSettings(**dag), ops=ops or {})


def with_model(name: str = "op", **values: Any) -> dict[str, OpSettings]:
    return {name: OpSettings(name=name, server_endpoints=("here",), **values)}


def asking(x: str = "x", **values: Any) -> PipelineRequest:
    return PipelineRequest(keys=["x"], values=[x], **values)


class Model:
    """Predictor on the loop: ``y = x + 1`` after a delay in seconds; ``calls`` records the rows of each call."""

    feed_names = ("x",)
    fetch_names = ("y",)

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds = seconds
        self.error = error
        self.calls: list[int] = []
        self.is_closed = False

    async def predict(
        self, feed: Mapping[str, Any], fetch: Sequence[str] | None = None, *, batch: bool = True
    ) -> dict[str, Any]:
        self.calls.append(len(feed["x"]))
        await trio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return {"y": np.asarray(feed["x"]) + 1}

    def check(self, feed: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    async def make(self, op_settings: OpSettings, index: int) -> Model:
        return self


def op_figures() -> dict[str, Any]:
    """Return the figures after five requests, one of which failed, and the end of a worker."""
    figures = PipelineCounters(lambda: 10.0)
    states = [ChannelState("chl0", ("@DAGExecutor",), ("det",), 3, 4), ChannelState("chl1", ("det",), ("rec",), 7)]
    figures.opened(["det", "rec\x1b[2J"], lambda: states)
    for number in range(4):
        figures.request_started(number, 0)
        figures.stage("det", 0, "midp", [number], (0.0, 0.004 * (number + 1)))
        figures.batch("det", 0, range(number + 1))
        code = 6000 if number == 3 else 0
        figures.request_finished(number, 0, code, (9.0, 9.5))
    figures.worker_died("det", 0, "killed")
    return snapshot(figures, 8)
