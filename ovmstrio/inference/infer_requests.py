"""Infer requests of a compiled model: completion queue, request slots, running inferences and the shared pool.

A failure leaves an OpenVINO stream in a state in which other requests fail or return wrong numbers
(``docs/openvino_defects.md``). A result is therefore returned only if no run started before it has failed; tainted runs
are repeated after recovery.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from time import perf_counter
from typing import Any, Final

import numpy as np
import openvino as ov
import structlog
import trio
from openvino._pyopenvino import InferRequest as BareRequest

from ovmstrio.core.errors import ConfigError, ModelFailure, PayloadTooLarge
from ovmstrio.core.tensor import BYTES, Array
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.shape_buckets import NO_SLICES, OutputSlices, slice_output
from ovmstrio.inference.signature import ModelSignature
from ovmstrio.inference.tensors import from_tensor, idle_tensor, placeholder, set_inputs, tensor_view, to_tensor
from ovmstrio.inference.tuner import ModelTuner

log = structlog.get_logger(__name__)

# How long the loop may be notified late, so that one wake-up covers several completions.
_MAX_DELAY_SECONDS: Final = 0.0005
# The same where more calls than requests exist, each of which waits for others anyway.
_MAX_DELAY_SECONDS_CROWDED: Final = 0.008
_MIN_DEVICE_SECONDS: Final = 1e-5

_ensure_gil_state: Final = ctypes.pythonapi.PyGILState_Ensure


class _CallingThread(threading.local):
    is_kept = False

    def keep(self) -> None:
        """Keep Python's state of the calling OpenVINO thread until the thread ends.

        Otherwise Python creates and frees that state, with memory from the system, for every callback. OpenVINO has few
        such threads and reuses them for later models.
        """
        self.is_kept = True
        _ensure_gil_state()


_calling_thread: Final = _CallingThread()


class CompletionQueue:
    """Completions of one model's inferences that the event loop has not processed.

    OpenVINO's threads only append; the first one to append to an empty queue wakes the loop. A callback that waits for
    the GIL would delay the device's next callback. While the device has enough work, completions are delivered in
    batches: each wake-up costs the loop its warm caches.
    """

    __slots__ = (
        "_ended",
        "_is_wakeup_pending",
        "_stream_ends",
        "_token",
        "concurrency",
        "has_begun",
        "most_waiting",
        "running",
    )

    def __init__(self, concurrency: int, streams: int = 1) -> None:
        self._token: trio.lowlevel.TrioToken | None = None
        self._ended: deque[trio.Event] = deque()
        self._is_wakeup_pending = False
        self.has_begun = False  # whether the queue belongs to an event loop
        self.configure(concurrency, streams)
        self.most_waiting = 0  # completions that may wait for another one before the loop is notified; 0 for none
        self.running = 0  # inferences started whose completion the loop has not processed

    def begin(self) -> None:
        """Attach the queue to the running event loop; required before the first inference."""
        self._token = trio.lowlevel.current_trio_token()
        self.has_begun = True

    def configure(self, concurrency: int, streams: int) -> None:
        """Set the number of concurrent inferences and streams."""
        self.concurrency = concurrency
        self._stream_ends = deque([0.0] * max(1, streams), maxlen=max(1, streams))

    def set_batching(self, seconds: float, limit: int, *, has_waiting_calls: bool) -> None:
        """Set the batch size of completions from the average device time of an inference."""
        late = _MAX_DELAY_SECONDS_CROWDED if has_waiting_calls else _MAX_DELAY_SECONDS
        self.most_waiting = min(limit, int(late * self.concurrency / max(seconds, _MIN_DEVICE_SECONDS)))

    def ends(self, now: float) -> float:
        """Record the end of an inference; return when its stream finished the previous one (``perf_counter``).

        Called by OpenVINO's threads in order of completion; the order in which the loop's tasks resume is arbitrary.
        """
        before = self._stream_ends[0]
        self._stream_ends.append(now)
        return before

    def miss(self) -> None:
        """Remove an inference that ended without a callback, and deliver waiting completions; on the loop."""
        self.running -= 1
        self.hear()

    def add(self, done: trio.Event) -> None:
        """Queue an event to be set on the loop; from any thread."""
        self._ended.append(done)
        waiting = len(self._ended)
        # If more inferences remain than the device runs at once, another completion is near.
        if (
            self._token is None
            or self._is_wakeup_pending
            or (waiting <= self.most_waiting and self.running - waiting > self.concurrency)
        ):
            return
        self._is_wakeup_pending = True
        try:
            self._token.run_sync_soon(self.hear)
        except trio.RunFinishedError:
            return

    def hear(self) -> None:
        """Set all queued events; on the loop."""
        # Order matters: an event appended after this line either wakes the loop again or is found below.
        self._is_wakeup_pending = False
        ended = self._ended
        while ended:
            # A momentary undercount causes at most one unnecessary wake-up.
            self.running -= 1
            ended.popleft().set()


class Completion:
    """Callback object of one request, called by OpenVINO.

    It must not reference the request: OpenVINO keeps the callback alive invisibly to the garbage collector, so a cycle
    would leak both.

    Attributes:
        at: ``perf_counter`` time of success; 0 until then.
        free_at: time at which the stream finished the previous inference.
    """

    __slots__ = ("_queue", "at", "done", "free_at")

    def __init__(self) -> None:
        self.done = trio.Event()  # set on the loop when the inference has succeeded
        self.at = self.free_at = 0.0
        self._queue: CompletionQueue | None = None

    def expect(self, queue: CompletionQueue) -> trio.Event:
        """Prepare for the next inference and return the event that its completion sets."""
        self._queue = queue
        if not queue.has_begun:
            queue.begin()
        queue.running += 1
        self.at = self.free_at = 0.0
        self.done = trio.Event()
        return self.done

    def __call__(self, _: Any) -> None:
        """Handle OpenVINO's callback; must not raise into OpenVINO's thread."""
        self.at = perf_counter()
        if not _calling_thread.is_kept:
            _calling_thread.keep()
        to, self._queue = self._queue, None
        if to is not None:
            self.free_at = to.ends(self.at)
            to.add(self.done)


_NO_INPUTS: Final[dict[int, ov.Tensor]] = {}
_infer: Final = BareRequest.infer
_start: Final = BareRequest.start_async
# The base-class methods skip the Python wrapper's checks of inputs: all inputs are set before the call.
_MARK_DIMENSION: Final = 7919
_MAX_COPIED_BYTES: Final = 16 * 1024  # inputs up to this size are copied into the request's own memory
# Requests that OpenVINO may still run from its queue; they must never be freed.
_retained_requests: Final[list[ov.InferRequest]] = []


class InferMode(Enum):
    """Execution mode of a slot on the calling thread; ``docs/openvino_defects.md`` explains the three modes."""

    SYNCHRONOUS = auto()
    """OpenVINO's synchronous call, which reports failures or cannot fail."""
    MARKED = auto()
    """The synchronous call where it loses failures; output shapes reveal them. For a single thread only."""
    QUEUED = auto()
    """An OpenVINO thread runs the inference and the caller waits."""


class UnreportedFailure(ModelFailure):
    """Failed inference whose reason OpenVINO dropped; a queued run of the same inputs reports the reason."""


def failure_marks(signature: ModelSignature) -> list[tuple[int, ov.Shape]] | None:
    """Return by output port an empty shape that no successful run leaves; None if no such shape exists.

    OpenVINO sets the shapes of dynamic outputs after all operations have run. An output that legitimately has the
    marked shape is treated as a failure and computed again in queued mode.
    """
    marks = []
    for port, spec in zip(signature.output_ports, signature.outputs, strict=True):
        if spec.datatype is BYTES or port in signature.unranked_outputs:
            return None
        if not all(dim.is_fixed for dim in spec.shape):
            marks.append((port, ov.Shape([0] + [0 if dim.is_fixed else _MARK_DIMENSION for dim in spec.shape[1:]])))
    return marks or None


class Slot:
    """One infer request.

    Between inferences the request holds placeholder tensors, so a caller's memory is not retained after its call.

    Attributes:
        request: OpenVINO's infer request.
        model: the compiled model of the request.
    """

    __slots__ = (
        "_arrays",
        "_blocking",
        "_can_copy_inputs",
        "_completion",
        "_copies",
        "_has_views",
        "_idle",
        "_is_stuck",
        "_marked",
        "_marks",
        "_results",
        "_signature",
        "broken",
        "model",
        "request",
    )

    def __init__(self, model: ov.CompiledModel, signature: ModelSignature, infer_mode: InferMode) -> None:
        self._blocking = infer_mode
        self._marks = failure_marks(signature) if infer_mode is InferMode.MARKED else None
        self._is_stuck = False
        self.broken = ""  # reason why the model can no longer run; empty if healthy
        self._signature = signature
        self._idle = [idle_tensor(spec) for spec in signature.inputs]
        self._arrays: Sequence[Array] = ()
        self._copies: Sequence[Array] | None = None
        self._can_copy_inputs = all(spec.datatype is not BYTES for spec in signature.inputs)
        self._has_views = all(spec.datatype is not BYTES for spec in signature.outputs)
        self._results: Sequence[Array] = ()
        self._completion = Completion()
        self._create(model)

    @property
    def is_queued(self) -> bool:
        """Return whether :meth:`infer` runs on an OpenVINO thread."""
        return self._blocking is InferMode.QUEUED

    def attach(self, model: ov.CompiledModel) -> None:
        """Replace the request by one of ``model``; nothing may be running."""
        self.retain_if_stuck()
        self._create(model)
        self.broken = ""

    def _create(self, model: ov.CompiledModel) -> None:
        request: ov.InferRequest = model.create_infer_request()
        request.set_callback(self._completion, None)
        # Fetching the output tensor per inference would cost as much as marking it.
        self._marked = [(request.get_output_tensor(port), mark) for port, mark in self._marks or ()]
        self._copies = None
        self.model = model
        self.request = request

    def retain_if_stuck(self) -> None:
        """Keep a request alive that OpenVINO may still run."""
        if self._is_stuck:
            _retained_requests.append(self.request)
            self._is_stuck = False

    def bind(self, arrays: Sequence[Array]) -> None:
        """Set the inputs, which are kept alive until :meth:`unbind`.

        Small inputs are copied, into the same memory while their shapes stay: that is cheaper than setting tensors.

        Raises:
            ModelFailure: OpenVINO refuses the inputs, or the model cannot be recovered.
        """
        if self.broken:
            raise ModelFailure(f"The model failed and cannot be reloaded: {self.broken}")
        if self._copies is not None and _copy_into(self._copies, arrays):
            return
        # OpenVINO references the previous tensors until others are set.
        before, self._copies = self._copies, None
        keeps = self._can_copy_inputs and sum([array.nbytes for array in arrays]) <= _MAX_COPIED_BYTES
        self._arrays = [np.array(array, order="C") for array in arrays] if keeps else arrays
        signature = self._signature
        try:
            tensors = [to_tensor(array, spec) for array, spec in zip(self._arrays, signature.inputs, strict=True)]
            set_inputs(self.request, signature.input_ports, tensors)
        except OPENVINO_ERRORS as error:
            set_inputs(self.request, signature.input_ports, self._idle)
            raise ModelFailure(f"OpenVINO refuses the inputs: {openvino_error_message(error)}") from error
        del before
        if keeps:
            self._copies = self._arrays

    def unbind(self) -> None:
        """Release the caller's inputs."""
        if self._copies is None or self._is_stuck:
            self._copies = None
            set_inputs(self.request, self._signature.input_ports, self._idle)
        self._arrays = ()

    def infer(self) -> None:
        """Run the inference on the calling thread, with the GIL released; raise ModelFailure if it fails."""
        request, self._results = self.request, ()
        try:
            if self._blocking is InferMode.QUEUED:
                request.start_async()
                request.wait()
                return
            for tensor, mark in self._marked:
                tensor.set_shape(mark)
            results = _infer(request, _NO_INPUTS, share_outputs=True, decode_strings=False)
            if self._has_views and len(results) == len(self._signature.outputs):
                self._results = [*results.values()]
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"Inference failed: {openvino_error_message(error)}") from error
        for tensor, mark in self._marked:
            # Checked on the tensor that was marked: if OpenVINO filled another one, every run would count as failed.
            if not tensor.get_size() and tensor.get_shape() == mark:
                self._is_stuck = True
                raise UnreportedFailure("Inference failed")
        self._is_stuck = False

    def verify(self) -> bool:
        """Run small inputs of different shapes and return whether the stream works again.

        A failure leaves no trace once every operation has seen another shape; the next success also removes the failed
        run from the thread's queue.
        """
        self.broken = ""
        sound = not self._signature.has_fixed_inputs and [self._runs_on_ones(more) for more in (0, 1, 0)][1:] == [
            True,
            True,
        ]
        self.unbind()
        return sound

    def _runs_on_ones(self, more: int) -> bool:
        try:
            self.bind([placeholder(spec, more) for spec in self._signature.inputs])
            self.infer()
        except ModelFailure:
            return False
        return True

    def start(self, completions: CompletionQueue) -> trio.Event:
        """Start an inference on OpenVINO's threads; return the event that is set on success only."""
        done, self._results = self._completion.expect(completions), ()
        try:
            _start(self.request, _NO_INPUTS, None)
        except OPENVINO_ERRORS as error:
            completions.miss()
            raise ModelFailure(f"Inference failed: {openvino_error_message(error)}") from error
        return done

    @property
    def ended_at(self) -> float:
        """``perf_counter`` time at which the last started inference succeeded; 0 otherwise."""
        return self._completion.at

    @property
    def ran(self) -> tuple[float, float]:
        """Times when the stream finished the previous inference and when this one succeeded (0 if it has not)."""
        return self._completion.free_at, self._completion.at

    def has_failed(self) -> bool:
        """Return whether the last started inference has failed, without waiting."""
        if self._completion.at:
            return False
        try:
            self.request.wait_for(0)
        except OPENVINO_ERRORS:
            return True
        return False

    def outputs(self, max_bytes: float = math.inf, output_slices: OutputSlices = NO_SLICES) -> list[Array]:
        """Copy the outputs, in signature order, without the parts cut off.

        Raises:
            PayloadTooLarge: the outputs exceed ``max_bytes`` together.
            ModelFailure: an output does not have the expected padded shape.
        """
        if self._results and not output_slices and max_bytes == math.inf:
            return self._copy_results()
        tensors = self._output_tensors()
        if output_slices:
            return self._cut_outputs(tensors, max_bytes, output_slices)
        if max_bytes != math.inf and (size := _size_of(tensors)) > max_bytes:
            raise PayloadTooLarge.of_outputs(size, max_bytes)
        return [from_tensor(tensor, spec) for tensor, spec in zip(tensors, self._signature.outputs, strict=True)]

    def _copy_results(self) -> list[Array]:
        results, self._results = self._results, ()
        signature, copies = self._signature, []
        for port, spec in zip(signature.output_ports, signature.outputs, strict=True):
            copy = results[port].copy()
            copies.append(copy if copy.dtype == spec.datatype.numpy else copy.view(spec.datatype.numpy))
        return copies

    def _cut_outputs(self, tensors: Sequence[ov.Tensor], max_bytes: float, output_slices: OutputSlices) -> list[Array]:
        specs = self._signature.outputs
        views = [
            slice_output(tensor_view(tensor, spec), output_slices.get(position, ()), spec.name)
            for position, (tensor, spec) in enumerate(zip(tensors, specs, strict=True))
        ]
        if (size := sum([view.nbytes for view in views])) > max_bytes:
            raise PayloadTooLarge.of_outputs(size, max_bytes)
        return [view.copy(order="C") for view in views]

    @property
    def output_bytes(self) -> int:
        """Size of all outputs; for string outputs the tensor size only, without the texts."""
        return _size_of(self._output_tensors())

    def _output_tensors(self) -> list[ov.Tensor]:
        return [self.request.get_output_tensor(port) for port in self._signature.output_ports]


def _copy_into(targets: Sequence[Array], arrays: Sequence[Array]) -> bool:
    """Copy arrays into others; False if shapes or types differ, in which case some may be copied."""
    if len(targets) != len(arrays):
        return False
    for target, array in zip(targets, arrays, strict=True):
        if array.shape != target.shape or array.dtype != target.dtype:
            return False
        target[...] = array
    return True


def _size_of(tensors: Sequence[ov.Tensor]) -> int:
    return sum([tensor.byte_size for tensor in tensors])


class _Turn:
    slot: Slot


class RequestPool:
    """First-come, first-served pool of slots, at a third of the cost of a memory channel."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.size = len(slots)  # number of slots
        self.active = 0  # number of slots in use
        self._free = deque(slots)
        self._callers: dict[trio.lowlevel.Task, _Turn] = {}

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a slot."""
        return len(self._callers)

    async def acquire(self) -> Slot:
        """Acquire a slot; the caller must release it."""
        slot = self._free.popleft() if self._free else await self._wait_for_slot()
        self.active += 1
        return slot

    async def _wait_for_slot(self) -> Slot:
        task, turn = trio.lowlevel.current_task(), _Turn()
        self._callers[task] = turn

        def give_up(_raise_cancel: object) -> trio.lowlevel.Abort:
            del self._callers[task]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)
        return turn.slot

    def add(self, slot: Slot) -> None:
        """Add a slot."""
        self.size += 1
        self.active += 1
        self.release(slot)

    def drop(self) -> None:
        """Remove the slot that the caller holds."""
        self.size -= 1
        self.active -= 1

    def release(self, slot: Slot) -> None:
        """Return a slot to the pool or hand it to the longest waiting caller."""
        self.active -= 1
        if not self._callers:
            self._free.append(slot)
            return
        task = next(iter(self._callers))
        self._callers.pop(task).slot = slot
        trio.lowlevel.reschedule(task)


class TaintedRunError(Exception):
    """A run ended, with any result, after another run failed; it must be repeated."""


@dataclass(eq=False, slots=True)
class Run:
    """One inference; ``is_culprit`` marks a failure on a healthy model, which the task that started it must recover."""

    slot: Slot
    done: trio.Event
    failures: int  # failures of the model before the run
    is_culprit: bool = False


class RunTracker:
    """Inferences on the device, in start order; used on the event loop only."""

    def __init__(self, ends: CompletionQueue, tuner: ModelTuner, *, may_fail: bool) -> None:
        self._ends = ends
        self._tuner = tuner
        self._may_fail = may_fail
        self._running: dict[Run, None] = {}

    @property
    def alone(self) -> bool:
        """Return whether at most one inference runs."""
        return len(self._running) <= 1

    def start(self, slot: Slot) -> Run:
        """Start an inference with the inputs bound to the slot; raise ModelFailure if OpenVINO refused to start it."""
        run = Run(slot, slot.start(self._ends), self._tuner.failures)
        self._running[run] = None
        return run

    def end(self, run: Run) -> None:
        """Remove an inference that has ended."""
        self._running.pop(run, None)
        if not run.slot.ended_at:
            # OpenVINO calls back neither for a failed nor for a cancelled run.
            self._ends.miss()

    def check(self, run: Run) -> None:
        """Check that the result of a finished run is valid; raise TaintedRunError if an earlier run failed."""
        if not self._may_fail or run.is_culprit:
            return
        if run.failures != self._tuner.failures:
            raise TaintedRunError
        for earlier in self._running:
            if earlier is run:
                return
            if earlier.slot.has_failed():
                self.mark_failed(earlier)
                raise TaintedRunError

    def mark_failed(self, culprit: Run | None = None) -> None:
        """Mark the model as failed by a run; nothing may start until its recovery has ended."""
        if self._tuner.begin_recovery() and culprit is not None:
            culprit.is_culprit = True
            culprit.done.set()


def replace_model(slots: Sequence[Slot], compile_replacement: Callable[[], ov.CompiledModel]) -> None:
    """Attach all requests to a recompiled model; if compilation fails, they reject every input. Blocks."""
    try:
        model = compile_replacement()
    except ConfigError as error:
        log.exception("failed model not reloaded", reason=error.message)
        for slot in slots:
            slot.broken = error.message
        return
    for slot in slots:
        slot.attach(model)
        slot.unbind()
