"""A pipeline that runs: takes requests, and answers each of them once."""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from types import NoneType
from typing import Any, Final

import numpy as np
import structlog
import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.core.events import note_failure
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import LoopCalls, call_in_thread, is_async
from ovmstrio.ops.executor import failures
from ovmstrio.ops.executor.channel import Channel, ReportStage, Result, Sample, StallDetector, Ticket
from ovmstrio.ops.executor.failures import OpFailure
from ovmstrio.ops.executor.stages import channel_data
from ovmstrio.ops.executor.workers import WorkerPool
from ovmstrio.ops.graph import OpGraph
from ovmstrio.ops.observing.figures import PIPELINE, SAMPLES, names_of_code
from ovmstrio.ops.observing.hooks import ChannelState, OpHooks
from ovmstrio.ops.op import EXECUTOR_NAME, RequestOp, ResponseOp
from ovmstrio.ops.settings import OpSettings, PipelineSettings
from ovmstrio.ops.tensors import ArrayTensor, as_response, unpack
from ovmstrio.ops.values import ChannelData, ChannelDataType, CustomExceptionCode, PipelineRequest, PipelineResponse
from ovmstrio.serving.batching import Batcher, BatchOptions
from ovmstrio.util.stdio import running_code_of
from ovmstrio.util.truncation import text_of

__all__ = [
    "LONGEST_SECONDS",
    "MOST_JUMPS",
    "PACK_SECONDS",
    "PROFILE_KEY",
    "Copier",
    "Executor",
    "OpRunner",
    "PackageHooks",
    "RequestRun",
    "failed",
    "without_profile",
]

# ----------------------------------------------------------------------
# The two ends of a pipeline: from a request to the first Ops' input, and from the last output to the answer
# ----------------------------------------------------------------------

PROFILE_KEY: Final = "pipeline.profile"
"""The key by which a request asks for its timeline, and under which it gets it."""

PACK_SECONDS: Final = 1.0
"""How long a pack hook gets at least, for a request whose time is over too."""

_HOOKS: Final = "hooks of the RequestOp or the ResponseOp"

_MOST_ELEMENTS_HERE: Final = 4096
"""How many numbers are read or printed on the loop at most."""

_MOST_BYTES_HERE: Final = 1 << 20
"""How many bytes of arrays are copied on the loop at most."""

log = structlog.get_logger(__name__)


def failed(data_id: int, log_id: int, failure: OpFailure) -> ChannelData:
    """Give a failure as a ResponseOp gets it."""
    data = ChannelData(ChannelDataType.ERROR.value, id=data_id, log_id=log_id)
    if failure.is_product:
        data.error_code = CustomExceptionCode.PRODUCT_ERROR.value
        data.prod_error_code, data.prod_error_info = failure.code, failure.info
    else:
        data.error_code, data.error_info = failure.code, failure.info
    return data


def without_profile(request: PipelineRequest) -> tuple[PipelineRequest, bool]:
    """Give a request without the key that asks for its timeline, and whether it does."""
    if PROFILE_KEY not in request.keys:
        return request, False
    position = request.keys.index(PROFILE_KEY)
    keys, values = list(request.keys), list(request.values)
    del keys[position]
    is_wanted = position < len(values) and values.pop(position) == "1"
    return replace(request, keys=keys, values=values), is_wanted


class PackageHooks:
    """Calls the hooks of the RequestOp and the ResponseOp.

    They run in threads if a service overrides them, or if there is much to read or to print.

    Args:
        graph: has both.
        threads: how many threads there may be, and how many calls on the loop that do not end.
        nursery: hosts hooks on the loop.

    Attributes:
        threads: where they run, which somebody has to host.
    """

    def __init__(self, graph: OpGraph, threads: int, nursery: trio.Nursery) -> None:
        self._request, self._response = graph.request, graph.response
        refusal = failures.refusal(threads / 2, _HOOKS)
        self.threads = WorkerThreads(threads, is_strict=True, refusal=refusal)
        self._calls = LoopCalls(nursery, failures.closed, failures.refusal(threads, _HOOKS))
        self._unpacks_here = _is_plain(graph.request.unpack_request_package, RequestOp.unpack_request_package)
        self._packs_here = _is_plain(graph.response.pack_response_package, ResponseOp.pack_response_package)
        self._packing: set[trio.CancelScope] = set()
        self._is_hurried = False

    def unpack_here(self, request: PipelineRequest) -> tuple[dict[str, Any], int] | None:
        """Give the same as :meth:`unpack` if it takes next to no time, None if it may take some.

        Raises:
            OpFailure: as there.
        """
        if not self._unpacks_here:
            return None
        try:
            if request.tensors and not _is_little(request):
                return None
            return unpack(request), request.logid
        except Exception as error:  # whatever the request holds
            raise _unreadable(error) from error

    async def unpack(self, request: PipelineRequest) -> tuple[dict[str, Any], int]:
        """Give the first Ops' input, and the client's number of the request.

        Raises:
            OpFailure: the request cannot be read, or the service refuses it.

        Cancellation: where the hook waits; at once if it is in a thread, which goes on.
        """
        try:
            returned = await self._call(self._request.unpack_request_package, request)
            data, log_id, code, info = _four(returned, request)
        except Exception as error:  # the border of user code
            raise (_unreadable if self._unpacks_here else _package_error)(error) from error
        if code is not None:
            raise failures.of_product(code, info)
        return data, log_id

    def pack_here(self, data: ChannelData) -> PipelineResponse | None:
        """Make the answer if that takes next to no time, None if it may take some."""
        if not self._packs_here:
            return None
        try:
            if data.npdata and _elements(data) > _MOST_ELEMENTS_HERE:
                return None
            return as_response(self._response.pack_response_package(data))
        except Exception as error:  # noqa: BLE001 - whatever the output holds
            return _failed_response(_package_error(error))

    async def pack(self, data: ChannelData, deadline: float) -> PipelineResponse:
        """Make the answer.

        Cancellation: as :meth:`unpack`.
        """
        soon = trio.current_time() + PACK_SECONDS
        scope = trio.CancelScope(deadline=soon if self._is_hurried else max(deadline, soon))
        self._packing.add(scope)
        try:
            with scope:
                return await self._packed(data)
        finally:
            self._packing.discard(scope)
        return _failed_response(failures.out_of_time())

    async def _packed(self, data: ChannelData) -> PipelineResponse:
        try:
            return as_response(await self._call(self._response.pack_response_package, data))
        except Exception as error:  # noqa: BLE001 - the border of user code
            return _failed_response(_package_error(error))

    def hurry(self) -> None:
        """Give every pack hook no more than the least time from now on."""
        self._is_hurried = True
        soon = trio.current_time() + PACK_SECONDS
        for scope in self._packing:
            scope.deadline = min(scope.deadline, soon)

    async def _call(self, hook: Callable[[Any], Any], argument: Any) -> Any:
        with running_code_of(names_of_code(getattr(getattr(hook, "__self__", None), "name", ""))):
            if is_async(hook):
                return await self._calls.call(hook, argument)
            return await call_in_thread(self.threads, hook, argument)


def _is_plain(hook: Any, default: Callable[..., Any]) -> bool:
    """Tell whether a hook is the one that the Op would have if no service overrode it."""
    return getattr(hook, "__func__", None) is default


def _is_little(request: PipelineRequest) -> bool:
    """Tell whether a request's tensors are read soon; arrays are at most copied."""
    arrays = sum(one.array.nbytes for one in request.tensors if isinstance(one, ArrayTensor))
    others = sum(math.prod(one.shape) for one in request.tensors if not isinstance(one, ArrayTensor))
    return arrays <= _MOST_BYTES_HERE and others <= _MOST_ELEMENTS_HERE


def _elements(data: ChannelData) -> int:
    """Tell how many numbers an output has."""
    values = (data.npdata or {}).values()
    return sum(value.size for value in values if isinstance(value, np.ndarray))


def _four(returned: Any, request: PipelineRequest) -> tuple[dict[str, Any], int, Any, Any]:
    """Give what ``unpack_request_package`` returned as the tuple that it may leave out.

    Raises:
        TypeError, ValueError: it is not what it may return.
    """
    if isinstance(returned, dict):
        return returned, request.logid, None, ""
    data, log_id, code, info = returned
    if code is None and not isinstance(data, dict):
        raise TypeError(f"unpack_request_package should return dict, got {type(data).__name__}")
    return data, 0 if log_id is None else int(log_id), code, info


def _package_error(error: BaseException) -> OpFailure:
    cause = failures.cause_of(error)
    log.error("request or answer cannot be packed", exc_info=cause)
    return _failure_of(cause)


def _unreadable(error: BaseException) -> OpFailure:
    """Make the failure of a request that no code of the user has read: where it was noticed is of no use to anybody."""
    return _failure_of(failures.cause_of(error))


def _failure_of(cause: BaseException) -> OpFailure:
    return OpFailure(CustomExceptionCode.RPC_PACKAGE_ERROR.value, f"rpc package error: {text_of(cause)}")


def _failed_response(failure: OpFailure) -> PipelineResponse:
    return PipelineResponse(err_no=failure.code, err_msg=failure.info)


# ----------------------------------------------------------------------
# Copies of outputs, for each of several takers may change what it gets
# ----------------------------------------------------------------------

_PLAIN: Final = frozenset({str, bytes, int, float, bool, complex, NoneType})
_MOST_VALUES_HERE: Final = 1000


class Copier:
    """Copies outputs: small ones of plain data at once, others in threads, for users' objects copy themselves.

    Args:
        threads: how many threads there may be.

    Attributes:
        threads: where large ones are copied, which somebody has to host.
    """

    def __init__(self, threads: int) -> None:
        refusal = failures.refusal(threads / 2, "copies of outputs")
        self.threads = WorkerThreads(threads, is_strict=True, refusal=refusal)

    async def copies(self, output: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Give each of several takers an output of its own; the last one gets the original.

        Raises:
            OpFailure: it cannot be copied.

        Ownership: the output until it returns.

        Cancellation: at once, while large outputs are copied; the thread goes on.
        """
        if count <= 1:
            return [output] * count
        try:
            if _is_small(output):
                return [*_copied(output, count - 1), output]
            return [*await call_in_thread(self.threads, _copied, output, count - 1), output]
        except Exception as error:
            text = f"an output that several need cannot be copied: {text_of(failures.cause_of(error))}"
            raise OpFailure(CustomExceptionCode.UNKNOW.value, text) from error


def _copied(output: dict[str, Any], count: int) -> list[dict[str, Any]]:
    return [copy.deepcopy(output) for _ in range(count)]


def _is_small(output: dict[str, Any]) -> bool:
    """Tell whether an output is nothing but plain data and arrays, and not much of it."""
    values: list[Any] = [output]
    size = 0
    for value in values:
        kind = type(value)
        if kind in {dict, list, tuple}:
            if len(values) + len(value) > _MOST_VALUES_HERE:
                return False
            values.extend(value.values() if kind is dict else value)
        elif kind is np.ndarray and not value.dtype.hasobject:
            size += value.nbytes
        elif kind not in _PLAIN and not issubclass(kind, np.generic):
            return False
    return size <= _MOST_BYTES_HERE


# ----------------------------------------------------------------------
# One Op that runs: its channel, its batches, its workers
# ----------------------------------------------------------------------


class OpRunner:
    """Takes the samples of one Op from its channel to its workers.

    Args:
        name: the Op's name.
        settings: what holds for it.
        capacity: how many samples its channel holds; 0 for any number.
        pool: its workers.
        stall_detector: knows whether anything in the pipeline moves.
        report_stage: is to be told how long outputs, which are there already, wait for room behind the Op.

    Attributes:
        channel: where samples wait.
        report_stage: as above.
    """

    def __init__(
        self,
        name: str,
        settings: OpSettings,
        capacity: int,
        pool: WorkerPool,
        *,
        stall_detector: StallDetector,
        report_stage: ReportStage,
    ) -> None:
        self.name = name
        self.report_stage = report_stage
        self._pool = pool
        self._stall_detector = stall_detector
        self._begun: set[Sample] = set()
        self._batcher: Batcher[Sample, Result] | None = None
        seats = settings.concurrency
        if settings.batch_size > 1:
            # One batch more than there are workers is collected while they work.
            seats = (settings.concurrency + 1) * settings.batch_size
            self._batcher = self._make_batcher(settings, seats)
        self.channel = Channel(capacity, seats)

    @property
    def is_working(self) -> bool:
        """Whether there is a worker that works, or is going to before long."""
        return self._pool.is_working

    def _make_batcher(self, settings: OpSettings, seats: int) -> Batcher[Sample, Result]:
        timeout = settings.batch_timeout_seconds
        if timeout is None:
            log.warning(
                "batches wait until they are full, or until no request moves any more: set auto_batching_timeout",
                op=self.name, batch_size=settings.batch_size,
            )  # fmt: skip
            timeout = math.inf
        options = BatchOptions(settings.batch_size, timeout, max_waiting=seats)
        batcher: Batcher[Sample, Result] = Batcher(self._run, options, concurrency=settings.concurrency)
        if timeout == math.inf:
            self._stall_detector.when_stalled(batcher.flush)
        return batcher

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the Op's batches until cancelled.

        Cancellation: at once; samples in batches end with 3001.
        """
        if self._batcher is None:
            task_status.started()
        else:
            await self._batcher.serve(task_status=task_status)

    def run(self, sample: Sample) -> Coroutine[Any, Any, list[Result]]:
        """Give what comes of a sample that has a seat.

        Ownership: the sample until it returns.

        Cancellation: at once; what a worker still does is waited for elsewhere.
        """
        return self._pool.run([sample]) if self._batcher is None else self._submit(self._batcher, sample)

    async def _submit(self, batcher: Batcher[Sample, Result], sample: Sample) -> list[Result]:
        try:
            self._stall_detector.stop()
            try:
                return [await batcher.submit(sample)]
            finally:
                if sample in self._begun:
                    self._begun.remove(sample)
                else:
                    self._stall_detector.go()
        except (NotReady, trio.ClosedResourceError):
            return [Result(failure=failures.closed())]

    async def _run(self, samples: Sequence[Sample]) -> Sequence[Result | OpFailure]:
        """Run one batch, its oldest request first.

        Cancellation: as the worker's.
        """
        for sample in samples:
            self._begun.add(sample)
            self._stall_detector.go()
        ordered = sorted(samples, key=lambda sample: sample.data_id)
        results = dict(zip(ordered, await self._pool.run(ordered), strict=True))
        return [results[sample] for sample in samples]


# ----------------------------------------------------------------------
# One attempt of one request: samples go from Op to Op as soon as all their inputs are there
# ----------------------------------------------------------------------

MOST_JUMPS: Final = 1000
"""How often one request may jump, so that a loop of Ops always ends."""


class RequestRun:
    """One attempt.  All that it holds goes with it: parts of joins, places in channels, tasks.

    Args:
        graph: the Ops.
        runners: what runs them, by their names.
        data_id: the server's number of the request.
        log_id: the client's.
        takes_first: whether an Op with several inputs runs with the one that comes first, and never again.
        stall_detector: is told of what moves.
        copier: copies outputs that several Ops get.
    """

    def __init__(
        self,
        graph: OpGraph,
        runners: Mapping[str, OpRunner],
        data_id: int,
        log_id: int,
        *,
        takes_first: bool,
        stall_detector: StallDetector,
        copier: Copier,
    ) -> None:
        self._graph = graph
        self._runners = runners
        self._data_id = data_id
        self._log_id = log_id
        self._takes_first = takes_first
        self._stall_detector = stall_detector
        self._copier = copier
        self._parts: dict[str, dict[str, Any]] = {}
        self._served: set[str] = set()
        self._tickets: set[Ticket] = set()
        self._jumps = 0
        self._output: dict[str, Any] | None = None
        self._failure: OpFailure | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self, first: dict[str, Any]) -> dict[str, Any]:
        """Give the last Op's output for the RequestOp's.

        Raises:
            OpFailure: the request ends with it.

        Ownership: tasks and places in channels, which are gone when it ends.

        Cancellation: at once; what workers still do is waited for elsewhere.
        """
        try:
            if self._graph.is_chain:
                ready = await self._hand_on(EXECUTOR_NAME, first)
                while ready:
                    ready = await self._work(*ready[0])
            else:
                await self._run_beside(first)
        finally:
            for ticket in list(self._tickets):
                ticket.leave()
        if self._failure is not None:
            raise self._failure
        if self._output is None:
            text = "no Op is left that runs, and the last one has not run"
            raise OpFailure(CustomExceptionCode.UNKNOW.value, text)
        return self._output

    async def _run_beside(self, first: dict[str, Any]) -> None:
        try:
            async with trio.open_nursery() as self._nursery:
                try:
                    await self._follow(await self._begin(first))
                finally:
                    self._stall_detector.stop()
        finally:
            self._stall_detector.go()

    async def _begin(self, first: dict[str, Any]) -> list[tuple[str, Ticket]]:
        try:
            return await self._hand_on(EXECUTOR_NAME, first)
        except OpFailure as failure:
            self._fail(failure)
            return []

    async def _follow(self, ready: list[tuple[str, Ticket]]) -> None:
        """Run Ops that are ready: one here, and then those that it makes ready; the others beside it."""
        while ready:
            for name, ticket in ready[1:]:
                self._start_beside(name, ticket)
            ready = await self._work(*ready[0])

    def _start_beside(self, name: str, ticket: Ticket) -> None:
        if self._nursery is None:
            raise AssertionError("Ops were run before their request")
        self._stall_detector.go()
        self._nursery.start_soon(self._beside, name, ticket)

    async def _beside(self, name: str, ticket: Ticket) -> None:
        try:
            await self._follow([(name, ticket)])
        finally:
            self._stall_detector.stop()

    async def _work(self, name: str, ticket: Ticket) -> list[tuple[str, Ticket]]:
        """Run an Op, and hold its seat until its output is in the next channels; gives who is ready then."""
        runner = self._runners[name]
        try:
            if not ticket.is_seated:
                await ticket.seated()
            (result,) = await runner.run(Sample(self._data_id, self._log_id, self._parts.pop(name)))
            if result.failure is not None:
                return self._op_failed(name, result.failure)
            begin = time.perf_counter()
            ready = await self._deliver(name, result)
            runner.report_stage("out", [self._data_id], (begin, time.perf_counter()))
        except OpFailure as failure:
            return self._op_failed(name, failure)
        except Exception as error:  # the border of the Op: an error of another kind must not get among cancellations
            log.exception("Op failed", op=name, data_id=self._data_id)
            note_failure(node=name)
            self._fail(failures.unforeseen(name, error))
            return []
        else:
            return ready
        finally:
            runner.channel.leave(ticket)
            self._tickets.discard(ticket)

    def _op_failed(self, name: str, failure: OpFailure) -> list[tuple[str, Ticket]]:
        if not self._is_superfluous(name):
            note_failure(node=name)
            self._fail(failure)
        return []

    async def _deliver(self, name: str, result: Result) -> list[tuple[str, Ticket]]:
        if result.output is None:
            raise AssertionError("a result is neither an output nor a failure")
        if result.jumps:
            return await self._jump(name, result.output)
        if name == self._graph.last:
            self._end(result.output)
            return []
        return await self._hand_on(name, result.output)

    def _is_superfluous(self, name: str) -> bool:
        """Tell whether nobody needs an Op's output any more, because all that it leads to has run without it."""
        if name == self._graph.last:
            return False
        return all(one in self._served or self._is_superfluous(one) for one in self._graph.consumers[name])

    def _end(self, output: dict[str, Any]) -> None:
        self._output = output
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _fail(self, failure: OpFailure) -> None:
        self._failure = self._failure or failure
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def _hand_on(
        self, producer: str, output: dict[str, Any], *, is_forced: bool = False
    ) -> list[tuple[str, Ticket]]:
        """Give an output to its consumers, and get those that have all their inputs now into their channels."""
        consumers: Sequence[str] = self._graph.consumers[producer]
        if self._served:
            consumers = [name for name in consumers if name not in self._served]
        outputs = [output] if len(consumers) == 1 else await self._copier.copies(output, len(consumers))
        ready = []
        # What is complete is known before the first channel is waited for.
        for name in tuple(map(self._added, consumers, repeat(producer), outputs)):
            if not name:
                continue
            channel = self._runners[name].channel
            ticket = channel.enter_now(self._data_id)
            if ticket is None:
                ticket = await channel.enter(self._data_id, is_forced=is_forced)
            self._tickets.add(ticket)
            ready.append((name, ticket))
        return ready

    def _added(self, name: str, producer: str, output: dict[str, Any]) -> str:
        """Note one input of an Op; gives its name if it has all that it needs."""
        inputs = self._graph.inputs[name]
        if len(inputs) == 1 or self._takes_first:
            if len(inputs) > 1:
                if name in self._served:  # by another input, while this one was copied
                    return ""
                self._served.add(name)
            self._parts[name] = {producer: output}
            return name
        parts = self._parts.setdefault(name, {})
        parts[producer] = output
        if len(parts) < len(inputs):
            return ""
        self._parts[name] = {one: parts[one] for one in inputs}
        return name

    async def _jump(self, name: str, output: dict[str, Any]) -> list[tuple[str, Ticket]]:
        self._jumps += 1
        if self._jumps > MOST_JUMPS:
            text = f"Op {name} has jumped {MOST_JUMPS} times for one request, as often as it may"
            raise OpFailure(CustomExceptionCode.UNKNOW.value, text)
        targets = self._graph.jumps[name]
        if self._graph.last in targets:
            self._end(output)
            return []
        ready = []
        for target, one in zip(targets, await self._copier.copies(output, len(targets)), strict=True):
            # A channel of a loop that is full must not wait for itself.
            ready += await self._hand_on(target, one, is_forced=True)
        return ready


# ----------------------------------------------------------------------
# A pipeline that runs: takes requests, and answers each of them once
# ----------------------------------------------------------------------


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
