"""Op pipeline executor: starts workers, admits requests, runs them through the graph of Ops and returns responses."""

from __future__ import annotations

import copy
import dis
import inspect
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from types import NoneType
from typing import Any, Final

import numpy as np
import structlog
import trio

from ovmstrio.core.errors import ConfigError, NotReady, Problem, error_type
from ovmstrio.core.events import set_failure
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import (
    AbandonableLoopCalls,
    UserCodeRaisedError,
    call_in_thread,
    call_on_loop,
    is_async,
)
from ovmstrio.ops.config_file import resolve_op_settings
from ovmstrio.ops.executor import failures
from ovmstrio.ops.executor.channel import Channel, Result, Sample, StageCallback, StallDetector, Ticket
from ovmstrio.ops.executor.failures import OpFailure
from ovmstrio.ops.executor.op_instance import init_error, make_channel_data
from ovmstrio.ops.executor.pipeline_source import PipelineSource
from ovmstrio.ops.executor.workers import GRACE_SECONDS, InstanceWorker, ProcessWorker, WorkerPool
from ovmstrio.ops.graph import OpGraph
from ovmstrio.ops.messages import (
    ArrayTensor,
    ChannelData,
    ChannelDataType,
    CustomExceptionCode,
    PipelineRequest,
    PipelineResponse,
    to_response,
    unpack_request,
)
from ovmstrio.ops.observing.hooks import NULL_HOOKS, ChannelState, OpHooks
from ovmstrio.ops.observing.log_files import PIPELINE, SAMPLES, log_fields_of
from ovmstrio.ops.op import EXECUTOR_NAME, Op, RequestOp, ResponseOp
from ovmstrio.ops.predictor.protocol import CreatePredictor
from ovmstrio.ops.settings import OpSettings, PipelineSettings
from ovmstrio.serving.batching import Batcher, BatchOptions
from ovmstrio.util.stdio import attribute_output_to
from ovmstrio.util.truncation import text_of

# Package hooks

PROFILE_KEY: Final = "pipeline.profile"
"""Request key that enables the timeline, and response key that holds it."""

MIN_PACK_SECONDS: Final = 1.0
"""Least time of a pack hook in seconds, even after the request's deadline."""

_HOOKS: Final = "hooks of the RequestOp or the ResponseOp"

_MAX_INLINE_ELEMENTS: Final = 4096
"""Most numbers that are parsed or printed on the event loop."""

_MAX_INLINE_BYTES: Final = 1 << 20
"""Most array bytes that are copied on the event loop."""

log = structlog.get_logger(__name__)


def failure_data(data_id: int, log_id: int, failure: OpFailure) -> ChannelData:
    """Return a failure in the form that a ResponseOp receives."""
    data = ChannelData(ChannelDataType.ERROR.value, data_id=data_id, log_id=log_id)
    if failure.is_product:
        data.error_code = CustomExceptionCode.PRODUCT_ERROR.value
        data.prod_error_code, data.prod_error_info = failure.code, failure.info
    else:
        data.error_code, data.error_info = failure.code, failure.info
    return data


def remove_profile_key(request: PipelineRequest) -> tuple[PipelineRequest, bool]:
    """Return the request without its timeline key, and whether the key was set to "1"."""
    if PROFILE_KEY not in request.keys:
        return request, False
    position = request.keys.index(PROFILE_KEY)
    keys, values = list(request.keys), list(request.values)
    del keys[position]
    is_wanted = position < len(values) and values.pop(position) == "1"
    return replace(request, keys=keys, values=values), is_wanted


class PackageHooks:
    """Caller of the hooks of RequestOp and ResponseOp; overridden hooks and large payloads run in ``threads``.

    The owner must run ``threads``.  At most as many calls on the loop may be left running.
    """

    def __init__(self, graph: OpGraph, threads: int, nursery: trio.Nursery) -> None:
        self._request, self._response = graph.request, graph.response
        refusal = failures.abandoned_call_limit(threads / 2, _HOOKS)
        self.threads = WorkerThreads(threads, is_strict=True, refusal=refusal)
        self._calls = AbandonableLoopCalls(
            nursery, failures.closed_failure, failures.abandoned_call_limit(threads, _HOOKS)
        )
        self._unpacks_inline = _is_plain(graph.request.unpack_request_package, RequestOp.unpack_request_package)
        self._packs_inline = _is_plain(graph.response.pack_response_package, ResponseOp.pack_response_package)
        self._packing: set[trio.CancelScope] = set()
        self._is_closing = False

    def try_unpack(self, request: PipelineRequest) -> tuple[dict[str, Any], int] | None:
        """Return the result of :meth:`unpack_request` if the default hook reads the request at once, else None."""
        if not self._unpacks_inline:
            return None
        try:
            if request.tensors and not _is_small_request(request):
                return None
            return unpack_request(request), request.logid
        except Exception as error:  # malformed request
            raise failures.package_failure(error) from error

    async def unpack(self, request: PipelineRequest) -> tuple[dict[str, Any], int]:
        """Return the input of the first Ops and the client's log id; OpFailure for a rejected or malformed request."""
        try:
            returned = await self._call(self._request.unpack_request_package, request)
            data, log_id, code, info = _normalize_unpacked(returned, request)
        except Exception as error:  # raised by user code
            raise (failures.package_failure if self._unpacks_inline else _package_error)(error) from error
        if code is not None:
            raise failures.product_failure(code, info)
        return data, log_id

    def try_pack(self, data: ChannelData) -> PipelineResponse | None:
        """Return the response if the default hook can build it at once, otherwise None."""
        if not self._packs_inline:
            return None
        try:
            if data.npdata:
                elements = sum(value.size for value in data.npdata.values() if isinstance(value, np.ndarray))
                if elements > _MAX_INLINE_ELEMENTS:
                    return None
            return to_response(self._response.pack_response_package(data))
        except Exception as error:  # noqa: BLE001 - values of users
            return _failed_response(_package_error(error))

    async def pack(self, data: ChannelData, deadline: float) -> PipelineResponse:
        """Return the response; a hook that exceeds its deadline gives error 6000."""
        soon = trio.current_time() + MIN_PACK_SECONDS
        scope = trio.CancelScope(deadline=soon if self._is_closing else max(deadline, soon))
        self._packing.add(scope)
        try:
            with scope:
                return to_response(await self._call(self._response.pack_response_package, data))
        except Exception as error:  # noqa: BLE001 - raised by user code
            return _failed_response(_package_error(error))
        finally:
            self._packing.discard(scope)
        return _failed_response(failures.deadline_failure())

    def limit_deadlines(self) -> None:
        """Limit all pack hooks to the least time from now on."""
        self._is_closing = True
        soon = trio.current_time() + MIN_PACK_SECONDS
        for scope in self._packing:
            scope.deadline = min(scope.deadline, soon)

    async def _call(self, hook: Callable[[Any], Any], argument: Any) -> Any:
        with attribute_output_to(log_fields_of(getattr(getattr(hook, "__self__", None), "name", ""))):
            if is_async(hook):
                return await self._calls.call(hook, argument)
            return await call_in_thread(self.threads, hook, argument)


def _is_plain(hook: Any, default: Callable[..., Any]) -> bool:
    return getattr(hook, "__func__", None) is default


def _is_small_request(request: PipelineRequest) -> bool:
    arrays = sum(one.array.nbytes for one in request.tensors if isinstance(one, ArrayTensor))
    others = sum(math.prod(one.shape) for one in request.tensors if not isinstance(one, ArrayTensor))
    return arrays <= _MAX_INLINE_BYTES and others <= _MAX_INLINE_ELEMENTS


def _normalize_unpacked(returned: Any, request: PipelineRequest) -> tuple[dict[str, Any], int, Any, Any]:
    if isinstance(returned, dict):
        return returned, request.logid, None, ""
    data, log_id, code, info = returned
    if code is None and not isinstance(data, dict):
        raise TypeError(f"unpack_request_package should return dict, got {type(data).__name__}")
    return data, 0 if log_id is None else int(log_id), code, info


def _package_error(error: BaseException) -> OpFailure:
    log.error("package hook failed", exc_info=failures.cause_of(error))
    return failures.package_failure(error)


def _failed_response(failure: OpFailure) -> PipelineResponse:
    return PipelineResponse(err_no=failure.code, err_msg=failure.info)


# Output copies

_PLAIN: Final = frozenset({str, bytes, int, float, bool, complex, NoneType})
_MAX_INLINE_VALUES: Final = 1000


class OutputCopier:
    """Copier of outputs for several consumers, each of which may modify its input.

    Small plain data is copied on the loop; the rest in ``threads``, which the owner must run, because objects of users
    copy themselves.
    """

    def __init__(self, threads: int) -> None:
        refusal = failures.abandoned_call_limit(threads / 2, "copies of outputs")
        self.threads = WorkerThreads(threads, is_strict=True, refusal=refusal)

    async def copies(self, output: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Return ``count`` outputs, the last one being the original; raises OpFailure if a copy fails."""
        if count <= 1:
            return [output] * count
        try:
            if _is_small(output):
                return [*_copied(output, count - 1), output]
            return [*await call_in_thread(self.threads, _copied, output, count - 1), output]
        except Exception as error:
            text = f"output for several Ops cannot be copied: {text_of(failures.cause_of(error))}"
            raise OpFailure(CustomExceptionCode.UNKNOW.value, text) from error


def _copied(output: dict[str, Any], count: int) -> list[dict[str, Any]]:
    return [copy.deepcopy(output) for _ in range(count)]


def _is_small(output: dict[str, Any]) -> bool:
    values: list[Any] = [output]
    size = 0
    for value in values:
        kind = type(value)
        if kind in {dict, list, tuple}:
            if len(values) + len(value) > _MAX_INLINE_VALUES:
                return False
            values.extend(value.values() if kind is dict else value)
        elif kind is np.ndarray and not value.dtype.hasobject:
            size += value.nbytes
        elif kind not in _PLAIN and not issubclass(kind, np.generic):
            return False
    return size <= _MAX_INLINE_BYTES


# Op runner


class OpRunner:
    """Runner of one Op, which moves samples from its channel through its batcher to its workers.

    The channel holds ``capacity`` samples, 0 for no limit.  ``report_stage`` receives how long outputs wait for the
    next channels.
    """

    def __init__(
        self,
        name: str,
        settings: OpSettings,
        capacity: int,
        pool: WorkerPool,
        *,
        stall_detector: StallDetector,
        report_stage: StageCallback,
    ) -> None:
        self.name = name
        self.report_stage = report_stage
        self._pool = pool
        self._stall_detector = stall_detector
        self._batched: set[Sample] = set()
        self._batcher: Batcher[Sample, Result] | None = None
        slots = settings.concurrency
        if settings.batch_size > 1:
            # The batcher collects one more batch while all workers are busy.
            slots = (settings.concurrency + 1) * settings.batch_size
            self._batcher = self._make_batcher(settings, slots)
        self.channel = Channel(capacity, slots)

    @property
    def is_working(self) -> bool:
        """True if a worker runs or is about to."""
        return self._pool.is_working

    def _make_batcher(self, settings: OpSettings, slots: int) -> Batcher[Sample, Result]:
        timeout = settings.batch_timeout_seconds
        if timeout is None:
            log.warning(
                "partial batches wait until the pipeline stalls: set auto_batching_timeout",
                op=self.name, batch_size=settings.batch_size,
            )  # fmt: skip
            timeout = math.inf
        options = BatchOptions(settings.batch_size, timeout, max_waiting=slots)
        batcher: Batcher[Sample, Result] = Batcher(self._run, options, concurrency=settings.concurrency)
        if timeout == math.inf:
            self._stall_detector.when_stalled(batcher.flush)
        return batcher

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the batcher until cancelled; samples in batches then fail with 3001."""
        if self._batcher is None:
            task_status.started()
        else:
            await self._batcher.serve(task_status=task_status)

    def run(self, sample: Sample) -> Coroutine[Any, Any, list[Result]]:
        """Return the coroutine that runs a sample which has a slot."""
        return self._pool.run([sample]) if self._batcher is None else self._submit(self._batcher, sample)

    async def _submit(self, batcher: Batcher[Sample, Result], sample: Sample) -> list[Result]:
        try:
            self._stall_detector.stop()
            try:
                return [await batcher.submit(sample)]
            finally:
                if sample in self._batched:
                    self._batched.remove(sample)
                else:
                    self._stall_detector.go()
        except (NotReady, trio.ClosedResourceError):
            return [Result(failure=failures.closed_failure())]

    async def _run(self, samples: Sequence[Sample]) -> Sequence[Result | OpFailure]:
        for sample in samples:
            self._batched.add(sample)
            self._stall_detector.go()
        ordered = sorted(samples, key=lambda sample: sample.data_id)
        results = dict(zip(ordered, await self._pool.run(ordered), strict=True))
        return [results[sample] for sample in samples]


# Request run

MAX_JUMPS: Final = 1000
"""Most jumps of one request, so that a loop of Ops ends."""


class RequestRun:
    """One attempt to run a request: samples move from Op to Op as soon as all their inputs exist.

    ``data_id`` is the server's number of the request, ``log_id`` the client's.  With ``runs_on_first_input`` an Op with
    several inputs runs once, with the first input that arrives.
    """

    def __init__(
        self,
        graph: OpGraph,
        runners: Mapping[str, OpRunner],
        data_id: int,
        log_id: int,
        *,
        runs_on_first_input: bool,
        stall_detector: StallDetector,
        copier: OutputCopier,
    ) -> None:
        self._graph = graph
        self._runners = runners
        self._data_id = data_id
        self._log_id = log_id
        self._takes_first = runs_on_first_input
        self._stall_detector = stall_detector
        self._copier = copier
        self._parts: dict[str, dict[str, Any]] = {}
        self._started: set[str] = set()
        self._tickets: set[Ticket] = set()
        self._jumps = 0
        self._output: dict[str, Any] | None = None
        self._failure: OpFailure | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self, first: dict[str, Any]) -> dict[str, Any]:
        """Run the Ops on the RequestOp's output and return the last Op's output; raises OpFailure."""
        try:
            if self._graph.is_chain:
                ready = await self._forward(EXECUTOR_NAME, first)
                while ready:
                    ready = await self._run_op(*ready[0])
            else:
                await self._run_in_nursery(first)
        finally:
            for ticket in list(self._tickets):
                ticket.leave()
        if self._failure is not None:
            raise self._failure
        if self._output is None:
            text = "no Op is left to run, and the last Op has not run"
            raise OpFailure(CustomExceptionCode.UNKNOW.value, text)
        return self._output

    async def _run_in_nursery(self, first: dict[str, Any]) -> None:
        try:
            async with trio.open_nursery() as self._nursery:
                try:
                    await self._run_ready(await self._forward_first(first))
                finally:
                    self._stall_detector.stop()
        finally:
            self._stall_detector.go()

    async def _forward_first(self, first: dict[str, Any]) -> list[tuple[str, Ticket]]:
        try:
            return await self._forward(EXECUTOR_NAME, first)
        except OpFailure as failure:
            self._fail(failure)
            return []

    async def _run_ready(self, ready: list[tuple[str, Ticket]]) -> None:
        while ready:
            for name, ticket in ready[1:]:
                self._start_parallel(name, ticket)
            ready = await self._run_op(*ready[0])

    def _start_parallel(self, name: str, ticket: Ticket) -> None:
        if self._nursery is None:
            raise AssertionError("Op started before its request")
        self._stall_detector.go()
        self._nursery.start_soon(self._run_parallel, name, ticket)

    async def _run_parallel(self, name: str, ticket: Ticket) -> None:
        try:
            await self._run_ready([(name, ticket)])
        finally:
            self._stall_detector.stop()

    async def _run_op(self, name: str, ticket: Ticket) -> list[tuple[str, Ticket]]:
        runner = self._runners[name]
        try:
            if not ticket.has_slot:
                await ticket.wait_for_slot()
            (result,) = await runner.run(Sample(self._data_id, self._log_id, self._parts.pop(name)))
            if result.failure is not None:
                return self._op_failed(name, result.failure)
            begin = time.perf_counter()
            ready = await self._deliver(name, result)
            runner.report_stage("out", [self._data_id], (begin, time.perf_counter()))
        except OpFailure as failure:
            return self._op_failed(name, failure)
        except Exception as error:  # must not leave the nursery in one group with cancellations
            log.exception("Op failed", op=name, data_id=self._data_id)
            set_failure(node=name, error_type=error_type(error))
            self._fail(failures.unexpected_failure(name, error))
            return []
        else:
            return ready
        finally:
            runner.channel.leave(ticket)
            self._tickets.discard(ticket)

    def _op_failed(self, name: str, failure: OpFailure) -> list[tuple[str, Ticket]]:
        if not self._is_unneeded(name):
            set_failure(node=name, error_type=failure.user_type)
            self._fail(failure)
        return []

    async def _deliver(self, name: str, result: Result) -> list[tuple[str, Ticket]]:
        if result.output is None:
            raise AssertionError("result has neither output nor failure")
        if result.jumps:
            return await self._jump(name, result.output)
        if name == self._graph.last:
            self._finish(result.output)
            return []
        return await self._forward(name, result.output)

    def _is_unneeded(self, name: str) -> bool:
        if name == self._graph.last:
            return False
        return all(one in self._started or self._is_unneeded(one) for one in self._graph.consumers[name])

    def _finish(self, output: dict[str, Any]) -> None:
        self._output = output
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _fail(self, failure: OpFailure) -> None:
        self._failure = self._failure or failure
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def _forward(
        self, producer: str, output: dict[str, Any], *, is_forced: bool = False
    ) -> list[tuple[str, Ticket]]:
        consumers: Sequence[str] = self._graph.consumers[producer]
        if self._started:
            consumers = [name for name in consumers if name not in self._started]
        outputs = [output] if len(consumers) == 1 else await self._copier.copies(output, len(consumers))
        ready = []
        # Record all inputs before the first wait for a channel.
        for name in tuple(map(self._add_input, consumers, repeat(producer), outputs)):
            if not name:
                continue
            channel = self._runners[name].channel
            ticket = channel.enter_now(self._data_id)
            if ticket is None:
                ticket = await channel.enter(self._data_id, is_forced=is_forced)
            self._tickets.add(ticket)
            ready.append((name, ticket))
        return ready

    def _add_input(self, name: str, producer: str, output: dict[str, Any]) -> str:
        inputs = self._graph.inputs[name]
        if len(inputs) == 1 or self._takes_first:
            if len(inputs) > 1:
                if name in self._started:  # another input started the Op while this one was copied
                    return ""
                self._started.add(name)
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
        if self._jumps > MAX_JUMPS:
            text = f"Op {name} exceeded {MAX_JUMPS} jumps for one request"
            raise OpFailure(CustomExceptionCode.UNKNOW.value, text)
        targets = self._graph.jumps[name]
        if self._graph.last in targets:
            self._finish(output)
            return []
        ready = []
        for target, one in zip(targets, await self._copier.copies(output, len(targets)), strict=True):
            # Forced: a full channel inside a loop would wait for itself.
            ready += await self._forward(target, one, is_forced=True)
        return ready


# Executor


class _Waiter:
    __slots__ = ("is_admitted", "resumed")

    def __init__(self) -> None:
        self.is_admitted = False
        self.resumed = trio.Event()


class PipelineAdmission:
    """Admission queue of a pipeline, first in, first out, for ``room`` requests and ``max_waiting`` waiting ones."""

    def __init__(self, room: int, max_waiting: int | None = None) -> None:
        self._free = room
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[_Waiter, None] = OrderedDict()
        self.is_closed = False

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def enter_now(self) -> bool:
        """Admit a request if it need not wait; the caller must then call :meth:`leave`."""
        if self.is_closed or not self._free or self._waiting:
            return False
        self._free -= 1
        return True

    async def enter(self, deadline: float) -> None:
        """Wait for admission; the caller must then call :meth:`leave`.

        Raises OpFailure 3001 if the pipeline is closed, 6000 if the deadline passes, 3002 if the queue is full.
        """
        if self.is_closed:
            raise failures.closed_failure()
        if self.enter_now():
            return
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            text = f"too many requests: {len(self._waiting)} wait, the limit is {self._max_waiting}; try again later"
            raise OpFailure(CustomExceptionCode.NO_SERVICE.value, text, is_overload=True)
        await self._wait(deadline)

    async def _wait(self, deadline: float) -> None:
        waiter = _Waiter()
        self._waiting[waiter] = None
        try:
            with trio.move_on_at(deadline):
                await waiter.resumed.wait()
        except BaseException:
            self._withdraw(waiter)
            raise
        if waiter.is_admitted:
            return
        self._withdraw(waiter)
        raise failures.closed_failure() if self.is_closed else failures.deadline_failure()

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter.is_admitted:
            self.leave()
        else:
            self._waiting.pop(waiter, None)

    def leave(self) -> None:
        """Release a place to the first waiting request."""
        if self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            waiter.is_admitted = True
            waiter.resumed.set()
        else:
            self._free += 1

    def close(self) -> None:
        """Reject new and waiting requests."""
        self.is_closed = True
        waiting, self._waiting = self._waiting, OrderedDict()
        for waiter in waiting:
            waiter.resumed.set()


MAX_REQUEST_SECONDS: Final = 3600.0
"""Time limit of a request without a deadline: a hook that never ends must not keep its caller forever."""


class Executor:
    """Executor of requests on a graph of Ops; created by ``open_executor``.

    Its log lines carry the pipeline name that :data:`PIPELINE` holds at construction.  The nursery hosts package hooks
    and copies.
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
        self._longest_seconds = settings.dag.request_timeout_seconds or MAX_REQUEST_SECONDS
        self._runners = runners
        self._hooks = hooks
        self._stall_detector = stall_detector
        self._numbers = numbers
        self._admission = PipelineAdmission(settings.worker_num, settings.dag.max_queue)
        self._package_hooks = PackageHooks(graph, 2 * settings.worker_num, nursery)
        self._copier = OutputCopier(2 * settings.worker_num)
        self._nursery = nursery
        self._pipeline = PIPELINE.get()
        self._now = trio.lowlevel.current_clock().current_time
        self._running: set[trio.CancelScope] = set()
        self._open_calls = 0
        self._is_aborted = False
        self._idle = trio.Event()

    async def start(self) -> None:
        """Start the threads of package hooks and copies; the end of the nursery abandons busy ones."""
        for threads in (self._package_hooks.threads, self._copier.threads):
            await self._nursery.start(partial(threads.run, is_shielded=False))

    # State

    def unready_reason(self) -> str:
        """Return why requests cannot be served now; empty if they can."""
        if self._admission.is_closed:
            return "the pipeline is closed"
        failing = self.failing_ops
        return f"no worker of {', '.join(failing)} runs" if failing else ""

    @property
    def failing_ops(self) -> list[str]:
        """Names of the Ops without a running worker."""
        return [name for name, runner in self._runners.items() if not runner.is_working]

    @property
    def in_flight(self) -> int:
        """Number of admitted requests that have no result yet."""
        return len(self._running)

    def channels(self) -> list[ChannelState]:
        """Return the state of the channels between Ops."""
        channels = [
            ChannelState(f"chl{number}", self.graph.inputs[name], (name,), runner.channel.size, runner.channel.capacity)
            for number, (name, runner) in enumerate(self._runners.items())
        ]
        # The last Op's output goes to the caller at once, so its channel is always empty.
        return [*channels, ChannelState(f"chl{len(channels)}", (self.graph.last,), (EXECUTOR_NAME,), 0)]

    # Requests

    async def infer(self, request: PipelineRequest, deadline: float = math.inf) -> PipelineResponse:
        """Run one request; failures, also a passed deadline (trio time), become responses with an error number."""
        limit = min(deadline, self._now() + self._longest_seconds)
        self._open_calls += 1
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
            self._open_calls -= 1
            if self._admission.is_closed and not self._open_calls:
                self._idle.set()

    async def _refused(self, request: PipelineRequest, failure: OpFailure, limit: float) -> PipelineResponse:
        data = failure_data(0, request.logid, failure)
        response = self._package_hooks.try_pack(data) or await self._package_hooks.pack(data, limit)
        response.is_overload = failure.is_overload
        return response

    async def _admitted(self, request: PipelineRequest, limit: float) -> PipelineResponse:
        data_id, begin, code, message = next(self._numbers), time.perf_counter(), None, ""
        wants_profile = False
        if PROFILE_KEY in request.keys:
            request, wants_profile = remove_profile_key(request)
        self._stall_detector.enter()
        caller = request.clientip, request.method
        self._hooks.request_started(data_id, request.logid, profile=wants_profile, caller=caller)
        samples = SAMPLES.set(((data_id, request.logid),))
        try:
            data = await self._evaluate(request, data_id, limit)
            data.keeps_arrays = request.keeps_arrays
            packing = time.perf_counter()
            response = self._package_hooks.try_pack(data) or await self._package_hooks.pack(data, limit)
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
        scope = trio.CancelScope(deadline=limit)
        self._running.add(scope)
        log_id, begin = request.logid, time.perf_counter()
        try:
            with scope:
                first, log_id = self._package_hooks.try_unpack(request) or await self._package_hooks.unpack(request)
                self._hooks.stage(EXECUTOR_NAME, 0, "prepack", [data_id], (begin, time.perf_counter()))
                if self._dag.retry > 1:
                    return make_channel_data(data_id, log_id, await self._attempts(first, data_id, log_id))
                return make_channel_data(data_id, log_id, await self._run(data_id, log_id).run(first))
        except OpFailure as failure:
            return failure_data(data_id, log_id, failure)
        except Exception as error:  # last resort: every caller gets a response
            log.exception("request failed", data_id=data_id)
            return failure_data(data_id, log_id, failures.unexpected_failure(EXECUTOR_NAME, error))
        finally:
            self._running.discard(scope)
        return failure_data(
            data_id, request.logid, failures.closed_failure() if self._is_aborted else failures.deadline_failure()
        )

    def _run(self, data_id: int, log_id: int) -> RequestRun:
        return RequestRun(
            self.graph, self._runners, data_id, log_id,
            runs_on_first_input=self._dag.channel_recv_frist_arrive, stall_detector=self._stall_detector,
            copier=self._copier,
        )  # fmt: skip

    async def _attempts(self, first: dict[str, Any], data_id: int, log_id: int) -> dict[str, Any]:
        for left in reversed(range(self._dag.retry)):
            try:
                # Hooks may modify their input, and each attempt starts from the original.
                attempt_input, first = await self._copier.copies(first, 2) if left else (first, first)
                return await self._run(data_id, log_id).run(attempt_input)
            except OpFailure as failure:
                is_late = failure.code == CustomExceptionCode.TIMEOUT.value and not failure.is_product
                if not left or not is_late:
                    raise
        raise AssertionError("retry count is zero")

    # End

    def close(self) -> None:
        """Reject new and waiting requests with 3001; admitted requests continue."""
        self._admission.close()

    async def aclose(self, grace_seconds: float) -> None:
        """Close, cancel requests with 3001 after the grace period, and wait for all responses; shielded."""
        self.close()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(grace_seconds):
                await self._wait_until_idle()
            self._is_aborted = True
            for scope in list(self._running):
                scope.cancel()
            self._package_hooks.limit_deadlines()
            await self._wait_until_idle()

    async def _wait_until_idle(self) -> None:
        while self._open_calls:
            self._idle = trio.Event()
            await self._idle.wait()


# Opening


def attributes_set_by_preprocess(op: Op) -> list[str]:
    """Return the names of the attributes that an Op's ``preprocess`` assigns, from its bytecode."""
    method: Any = inspect.unwrap(type(op).preprocess)
    code = getattr(method, "__code__", None)
    if code is None or not code.co_argcount:
        return []
    owner, names, loaded = code.co_varnames[0], [], ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and loaded == owner:
            names.append(str(instruction.argval))
        loaded = _loaded(instruction)
    return list(dict.fromkeys(names))


def _loaded(instruction: dis.Instruction) -> str:
    """Return the variable that an instruction leaves on top of the stack; empty for none."""
    if "LOAD_FAST" not in instruction.opname:
        return ""
    # One instruction may load or store two variables.
    value = instruction.argval
    return str(value[-1] if isinstance(value, tuple) else value)


_LAST_NUMBER = 10**18


_Startable = InstanceWorker | ProcessWorker


@dataclass(slots=True)
class _Opening:
    graph: OpGraph
    settings: PipelineSettings
    make_predictor: CreatePredictor | None
    hooks: OpHooks
    source: PipelineSource | None
    nursery: trio.Nursery
    stall_detector: StallDetector
    workers: list[_Startable] = field(default_factory=list)
    pools: dict[str, WorkerPool] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    async def runners(self) -> dict[str, OpRunner]:
        resolved = {name: resolve_op_settings(op, self.settings) for name, op in self.graph.ops.items()}
        runners = {name: self._runner(self.graph.ops[name], one) for name, one in resolved.items()}
        for end in (self.graph.request, self.graph.response):
            if is_async(end.init_op):
                await self._start_recorded(partial(_init_end, end))
        async with trio.open_nursery() as starting:
            for worker in self.workers:
                starting.start_soon(self._start_recorded, worker.start)
        return runners

    async def executor(self, runners: dict[str, OpRunner], numbers: Iterable[int]) -> Executor:
        for runner in runners.values():
            await self.nursery.start(runner.serve)
        self.nursery.start_soon(self.stall_detector.watch)
        in_turn = chain.from_iterable(repeat(numbers))
        executor = Executor(
            self.graph, self.settings, runners,
            hooks=self.hooks, stall_detector=self.stall_detector, numbers=in_turn, nursery=self.nursery,
        )  # fmt: skip
        await executor.start()
        self.hooks.opened(list(self.graph.ops), executor.channels)
        log.info("pipeline opened", ops=list(self.graph.ops), inputs=dict(self.graph.inputs))
        return executor

    def _runner(self, op: Op, settings: OpSettings) -> OpRunner:
        make = self._thread_worker if self.settings.dag.is_thread_op else self._process_worker
        if settings.batch_size > 1 and (kept := attributes_set_by_preprocess(op)):
            event = "preprocess stores sample state on self, batches share it: set batch_size to 1"
            log.warning(event, op=op.name, attributes=kept, batch_size=settings.batch_size)
        workers = [make(op, settings, index) for index in range(settings.concurrency)]
        self.workers += workers
        pool = self.pools[op.name] = WorkerPool(op.name, workers, self.nursery, self.hooks)
        report_stage = partial(self.hooks.stage, op.name, 0)
        size = self.settings.dag.channel_size
        return OpRunner(op.name, settings, size, pool, stall_detector=self.stall_detector, report_stage=report_stage)

    def _thread_worker(self, op: Op, settings: OpSettings, index: int) -> _Startable:
        report_stage = partial(self.hooks.stage, op.name, index)
        return InstanceWorker(op, settings, index, self.make_predictor, report_stage=report_stage, nursery=self.nursery)

    def _process_worker(self, op: Op, _settings: OpSettings, index: int) -> _Startable:
        if self.source is None:
            raise AssertionError("pipeline with worker processes has no source")

        def died(reason: str) -> None:
            self.hooks.worker_died(op.name, index, reason)
            self.pools[op.name].notice(worker)

        report_stage = partial(self.hooks.stage, op.name, index)
        worker = ProcessWorker(
            op.name, index, self.source, nursery=self.nursery, report_stage=report_stage, on_exit=died
        )
        return worker

    async def _start_recorded(self, start: Callable[[], Awaitable[None]]) -> None:
        try:
            await start()
        except ConfigError as error:
            self.problems += error.problems
        except OSError as error:
            self.problems.append(Problem(f"worker cannot be started: {error}"))


async def _init_end(end: Op) -> None:
    try:
        await call_on_loop(end.init_op, names=log_fields_of(end.name))
    except UserCodeRaisedError as raised:
        raise init_error(end, raised) from raised.error


@asynccontextmanager
async def open_executor(
    graph: OpGraph,
    settings: PipelineSettings,
    *,
    make_predictor: CreatePredictor | None = None,
    hooks: OpHooks = NULL_HOOKS,
    source: PipelineSource | None = None,
    numbers: Iterable[int] = range(_LAST_NUMBER),
    grace_seconds: float = GRACE_SECONDS,
) -> AsyncIterator[Executor]:
    """Start the workers of a pipeline's Ops and run them; leaving the block stops them.

    Args:
        graph: the Ops.
        settings: settings of the pipeline.
        make_predictor: creates the predictors of models; not called for Ops without a model.
        hooks: receive events.
        source: lets worker processes load the pipeline; required with ``is_thread_op: false``.
        numbers: data ids of requests.
        grace_seconds: time for open requests to finish when the block is left; the rest fail with 3001.

    Raises:
        ConfigError: an Op cannot be started, for example because ``init_op`` raised; all problems are listed.
    """
    reject_ambiguous_loops(graph, settings)
    if source is None and not settings.dag.is_thread_op:
        message = f"worker processes of {', '.join(graph.ops)} have no pipeline source"
        raise ConfigError([Problem(message, suggestion="pass `source`, or set `is_thread_op: true`")])
    problems: list[Problem] = []
    async with trio.open_nursery() as nursery:
        stall_detector = StallDetector(settings.worker_num)
        opening = _Opening(graph, settings, make_predictor, hooks, source, nursery, stall_detector)
        try:
            runners = await opening.runners()
            problems = opening.problems
            if not problems:
                executor = await opening.executor(runners, numbers)
                try:
                    yield executor
                finally:
                    await executor.aclose(grace_seconds)
        finally:
            # Shielded: each worker closes in bounded time.
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as closing:
                    for worker in opening.workers:
                        closing.start_soon(worker.aclose)
            nursery.cancel_scope.cancel()
    if problems:
        raise ConfigError(problems)


def reject_ambiguous_loops(graph: OpGraph, settings: PipelineSettings) -> None:
    """Raise ConfigError for loops with an Op that takes its first input, which may belong to the previous round."""
    joins = [name for name, inputs in graph.inputs.items() if len(inputs) > 1]
    if settings.dag.channel_recv_frist_arrive and graph.jumps and joins:
        message = f"channel_recv_frist_arrive is set, but {', '.join(graph.jumps)} jump and {', '.join(joins)} join"
        raise ConfigError([Problem(message, suggestion="unset it")])
