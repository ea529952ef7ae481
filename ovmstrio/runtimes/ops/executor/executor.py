"""A pipeline that runs: takes requests, and answers each of them once."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import structlog
import trio

from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.channel import StallDetector
from ovmstrio.runtimes.ops.executor.copying import Copier
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.executor.package_hooks import PROFILE_KEY, PackageHooks, failed, without_profile
from ovmstrio.runtimes.ops.executor.request import RequestRun
from ovmstrio.runtimes.ops.executor.runner import OpRunner
from ovmstrio.runtimes.ops.executor.stages import channel_data
from ovmstrio.runtimes.ops.graph import OpGraph
from ovmstrio.runtimes.ops.observing.figures import PIPELINE, SAMPLES
from ovmstrio.runtimes.ops.observing.hooks import ChannelState, OpHooks
from ovmstrio.runtimes.ops.op import EXECUTOR_NAME
from ovmstrio.runtimes.ops.values import ChannelData, CustomExceptionCode, PipelineRequest, PipelineResponse

__all__ = ["LONGEST_SECONDS", "Executor"]


class _Turn:
    """One request that waits; ``is_in`` once a place is its own."""

    __slots__ = ("called", "is_in")

    def __init__(self) -> None:
        self.is_in = False
        self.called = trio.Event()


class PipelineAdmission:
    """The door.

    Args:
        room: how many requests are inside at once.
        max_waiting: how many wait at most; None for any number.
    """

    def __init__(self, room: int, max_waiting: int | None = None) -> None:
        self._free = room
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[_Turn, None] = OrderedDict()
        self.is_closed = False

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def enter_now(self) -> bool:
        """Let a request in if it has not to wait; the place is the caller's then, who has to :meth:`leave` it."""
        if self.is_closed or not self._free or self._waiting:
            return False
        self._free -= 1
        return True

    async def enter(self, deadline: float) -> None:
        """Wait to be let in.

        Raises:
            OpFailure: 3001, nobody is let in any more; 6000, the deadline passed first; 3002, too many wait.

        Ownership: a place inside, which the caller has to :meth:`leave`.

        Cancellation: at once, while it waits.
        """
        if self.is_closed:
            raise failures.closed()
        if self.enter_now():
            return
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            text = f"too many requests: {len(self._waiting)} wait, as many as may; try again later"
            raise OpFailure(CustomExceptionCode.NO_SERVICE.value, text, is_overload=True)
        await self._wait(deadline)

    async def _wait(self, deadline: float) -> None:
        turn = _Turn()
        self._waiting[turn] = None
        try:
            with trio.move_on_at(deadline):
                await turn.called.wait()
        except BaseException:
            self._give_up(turn)
            raise
        if turn.is_in:
            return
        self._give_up(turn)
        raise failures.closed() if self.is_closed else failures.out_of_time()

    def _give_up(self, turn: _Turn) -> None:
        if turn.is_in:
            self.leave()
        else:
            self._waiting.pop(turn, None)

    def leave(self) -> None:
        """Give the place up, to the first that waits."""
        if self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            turn.is_in = True
            turn.called.set()
        else:
            self._free += 1

    def close(self) -> None:
        """Let nobody in any more, and send those away that wait."""
        self.is_closed = True
        waiting, self._waiting = self._waiting, OrderedDict()
        for turn in waiting:
            turn.called.set()


LONGEST_SECONDS: Final = 3600.0
"""How long a request without any deadline may take: a hook that never ends must not keep its caller forever."""

log = structlog.get_logger(__name__)


class Executor:
    """Runs requests through the Ops; made by ``open_executor``.

    Args:
        graph: the Ops.
        settings: what holds for all of them.
        runners: what runs them, by their names.
        hooks: are told of requests.
        stall_detector: knows what moves.
        numbers: the numbers that requests get.
        nursery: hosts hooks of the graph's ends, and copies.

    What it does is logged in the name of the pipeline that it was made for, as :data:`PIPELINE` said then.
    """

    def __init__(
        self,
        graph: OpGraph,
        settings: PipelineSettings,
        runners: Mapping[str, OpRunner],
        *,
        hooks: OpHooks,
        stall_detector: StallDetector,
        numbers: Iterator[int],
        nursery: trio.Nursery,
    ) -> None:
        self.graph = graph
        self._dag = settings.dag
        self._longest_seconds = settings.dag.request_timeout_seconds or LONGEST_SECONDS
        self._runners = runners
        self._hooks = hooks
        self._stall_detector = stall_detector
        self._numbers = numbers
        self._admission = PipelineAdmission(settings.worker_num, settings.dag.max_queue)
        self._package_hooks = PackageHooks(graph, 2 * settings.worker_num, nursery)
        self._copier = Copier(2 * settings.worker_num)
        self._nursery = nursery
        self._pipeline = PIPELINE.get()
        self._now = trio.lowlevel.current_clock().current_time
        self._running: set[trio.CancelScope] = set()
        self._asked = 0
        self._is_cut = False
        self._idle = trio.Event()

    async def start(self) -> None:
        """Have threads, which end with the nursery; those that are busy then are left to themselves.

        Cancellation: at once.
        """
        for threads in (self._package_hooks.threads, self._copier.threads):
            await self._nursery.start(partial(threads.run, is_shielded=False))

    # State

    def obstacle(self) -> str:
        """Tell why requests cannot be answered now; empty if they can."""
        if self._admission.is_closed:
            return "the pipeline is closed"
        failing = self.failing_ops
        return f"no worker of {', '.join(failing)} runs" if failing else ""

    @property
    def failing_ops(self) -> list[str]:
        """The Ops none of whose workers runs."""
        return [name for name, runner in self._runners.items() if not runner.is_working]

    @property
    def in_flight(self) -> int:
        """How many requests are in the pipeline, without those that wait for a place."""
        return len(self._running)

    def channels(self) -> list[ChannelState]:
        """Tell what waits between Ops."""
        channels = [
            ChannelState(f"chl{number}", self.graph.inputs[name], (name,), runner.channel.size, runner.channel.capacity)
            for number, (name, runner) in enumerate(self._runners.items())
        ]
        # What the last Op has made goes to its caller at once.
        return [*channels, ChannelState(f"chl{len(channels)}", (self.graph.last,), (EXECUTOR_NAME,), 0)]

    # Requests

    async def infer(self, request: PipelineRequest, deadline: float = math.inf) -> PipelineResponse:
        """Answer one request; never raises because of what it holds or what Ops do.

        Args:
            request: what came.
            deadline: when, on trio's clock, its caller does not want the answer any more; it gets 6000 then.

        Ownership: nothing once it has ended.

        Cancellation: at once, which is how a caller leaves; what workers still do is waited for elsewhere.
        """
        limit = min(deadline, self._now() + self._longest_seconds)
        self._asked += 1
        pipeline = PIPELINE.set(self._pipeline)
        try:
            if not self._admission.enter_now():
                try:
                    await self._admission.enter(limit)
                except OpFailure as failure:
                    return await self._refused(request, failure, limit)
            try:
                return await self._admitted(request, limit)
            finally:
                self._admission.leave()
        finally:
            PIPELINE.reset(pipeline)
            self._asked -= 1
            if self._admission.is_closed and not self._asked:
                self._idle.set()

    async def _refused(self, request: PipelineRequest, failure: OpFailure, limit: float) -> PipelineResponse:
        data = failed(0, request.logid, failure)
        response = self._package_hooks.pack_here(data) or await self._package_hooks.pack(data, limit)
        response.is_overload = failure.is_overload
        return response

    async def _admitted(self, request: PipelineRequest, limit: float) -> PipelineResponse:
        data_id, begin, code, message = next(self._numbers), time.perf_counter(), None, ""
        wants_profile = False
        if PROFILE_KEY in request.keys:
            request, wants_profile = without_profile(request)
        self._stall_detector.enter()
        caller = request.clientip, request.method
        self._hooks.request_started(data_id, request.logid, profile=wants_profile, caller=caller)
        samples = SAMPLES.set(((data_id, request.logid),))
        try:
            data = await self._evaluate(request, data_id, limit)
            data.keeps_arrays = request.keeps_arrays
            packing = time.perf_counter()
            response = self._package_hooks.pack_here(data) or await self._package_hooks.pack(data, limit)
            self._hooks.stage(EXECUTOR_NAME, 0, "postpack", [data_id], (packing, time.perf_counter()))
            if wants_profile:
                response.keys.append(PROFILE_KEY)
                response.values.append(self._hooks.timeline(data_id))
            code, message = response.err_no, response.err_msg
            return response
        finally:
            SAMPLES.reset(samples)
            self._stall_detector.leave()
            self._hooks.request_finished(data_id, request.logid, code, (begin, time.perf_counter()), message)

    async def _evaluate(self, request: PipelineRequest, data_id: int, limit: float) -> ChannelData:
        """Give the last Op's output, or why there is none."""
        scope = trio.CancelScope(deadline=limit)
        self._running.add(scope)
        log_id, begin = request.logid, time.perf_counter()
        try:
            with scope:
                first, log_id = self._package_hooks.unpack_here(request) or await self._package_hooks.unpack(request)
                self._hooks.stage(EXECUTOR_NAME, 0, "prepack", [data_id], (begin, time.perf_counter()))
                if self._dag.retry > 1:
                    return channel_data(data_id, log_id, await self._attempts(first, data_id, log_id))
                return channel_data(data_id, log_id, await self._run(data_id, log_id).run(first))
        except OpFailure as failure:
            return failed(data_id, log_id, failure)
        except Exception as error:  # the last border of whatever users make of hooks: a caller gets an answer
            log.exception("request failed", data_id=data_id)
            return failed(data_id, log_id, failures.unforeseen(EXECUTOR_NAME, error))
        finally:
            self._running.discard(scope)
        return failed(data_id, request.logid, failures.closed() if self._is_cut else failures.out_of_time())

    def _run(self, data_id: int, log_id: int) -> RequestRun:
        return RequestRun(
            self.graph, self._runners, data_id, log_id,
            takes_first=self._dag.channel_recv_frist_arrive, stall_detector=self._stall_detector, copier=self._copier,
        )  # fmt: skip

    async def _attempts(self, first: dict[str, Any], data_id: int, log_id: int) -> dict[str, Any]:
        """Run a request through the Ops, again from the beginning if an Op takes too long.

        Raises:
            OpFailure: the last attempt ended with it.
        """
        for left in reversed(range(self._dag.retry)):
            try:
                # Hooks may change what they get, and each attempt begins with what was asked.
                mine, first = await self._copier.copies(first, 2) if left else (first, first)
                return await self._run(data_id, log_id).run(mine)
            except OpFailure as failure:
                is_late = failure.code == CustomExceptionCode.TIMEOUT.value and not failure.is_product
                if not left or not is_late:
                    raise
        raise AssertionError("a request was not attempted at all")

    # End

    def close(self) -> None:
        """Take no more requests, and answer those that wait for a place with 3001; those that have one go on."""
        self._admission.close()

    async def aclose(self, grace_seconds: float) -> None:
        """Close, answer with 3001, too, what goes on after a while, and return when every request has its answer.

        Cancellation: shielded, for it is bounded.
        """
        self.close()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(grace_seconds):
                await self._until_idle()
            self._is_cut = True
            for scope in list(self._running):
                scope.cancel()
            self._package_hooks.hurry()
            await self._until_idle()

    async def _until_idle(self) -> None:
        while self._asked:
            self._idle = trio.Event()
            await self._idle.wait()
