"""One infer request: its inputs, its run, its outputs, and how it is mended after a failure."""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from time import perf_counter
from typing import Any, Final

import numpy as np
import openvino as ov
import trio
from openvino._pyopenvino import InferRequest as BareRequest

from ovmstrio.core.errors import ModelFailure, PayloadTooLarge
from ovmstrio.core.tensor import BYTES, Array
from ovmstrio.inference.runtime import OPENVINO_ERRORS, reason
from ovmstrio.inference.shape_buckets import NO_CUTS, Cuts, cut_view
from ovmstrio.inference.signature import ModelSignature
from ovmstrio.inference.tensors import from_tensor, idle_tensor, placeholder, set_inputs, to_tensor, view_of

__all__ = ["Blocking", "Completion", "CompletionQueue", "LostFailure", "RequestPool", "Slot", "marks_of"]

# ----------------------------------------------------------------------
# Brings the ends of inferences from OpenVINO's threads to the event loop, many with one wake-up
# ----------------------------------------------------------------------

_LATE_SECONDS: Final = 0.0005
"""How much later the loop may hear of an end, for it to hear of several at once."""
_LATE_SECONDS_OF_MANY: Final = 0.008
"""The same where there are more calls than requests, each of which waits for many others anyway."""
_LEAST_SECONDS: Final = 1e-5

_take_state: Final = ctypes.pythonapi.PyGILState_Ensure


class _CallingThread(threading.local):
    """What Python knows of the running thread, for as long as it knows it."""

    is_kept = False

    def keep(self) -> None:
        """Have Python know the thread to its end.

        It would forget a thread that is not its own behind each callback, and make all of that anew for the next one,
        with memory from the system and back to it.  OpenVINO has few such threads, and uses them for its next models.
        """
        self.is_kept = True
        _take_state()


_calling_thread: Final = _CallingThread()


class CompletionQueue:
    """The ends of one model's inferences that the event loop has yet to hear of.

    OpenVINO's threads only append, and the first one behind an empty queue wakes the loop: who waits for Python's lock
    holds up the device's next callback.

    While the device has inferences enough, some ends wait for each other: behind an inference the loop finds other
    things in the processor's caches than its own, and the first of several calls pays for all of them.

    Args:
        side_by_side: how many inferences the device runs at once.
        streams: of the model.

    Attributes:
        side_by_side: as given.
        has_begun: whether it belongs to a loop.
        most_waiting: how many ends may wait for another one before the loop hears of them; 0 for none.
        running: how many inferences were begun whose ends the loop has not heard of.
    """

    __slots__ = ("_ended", "_last", "_token", "_woken", "has_begun", "most_waiting", "running", "side_by_side")

    def __init__(self, side_by_side: int, streams: int = 1) -> None:
        self._token: trio.lowlevel.TrioToken | None = None
        self._ended: deque[trio.Event] = deque()
        self._woken = False
        self.has_begun = False
        self.be_of(side_by_side, streams)
        self.most_waiting = 0
        self.running = 0

    def begin(self) -> None:
        """Belong to the loop that runs; before anything is expected."""
        self._token = trio.lowlevel.current_trio_token()
        self.has_begun = True

    def be_of(self, side_by_side: int, streams: int) -> None:
        """Be of a model that runs so many at once in so many streams from now on."""
        self.side_by_side = side_by_side
        self._last = deque([0.0] * max(1, streams), maxlen=max(1, streams))

    def let_wait(self, seconds: float, most: int, *, is_crowded: bool) -> None:
        """Say how many ends the loop may hear of late, by what an inference takes on the device.

        Longer where calls wait for a request, and longer for that.
        """
        late = _LATE_SECONDS_OF_MANY if is_crowded else _LATE_SECONDS
        self.most_waiting = min(most, int(late * self.side_by_side / max(seconds, _LEAST_SECONDS)))

    def ends(self, now: float) -> float:
        """Note that an inference ends; gives when its stream was done with the one before, by ``perf_counter``.

        Called by OpenVINO's threads, in the order of the ends: the loop's tasks, which hear of several at once, go on
        in no order.
        """
        before = self._last[0]
        self._last.append(now)
        return before

    def miss(self) -> None:
        """Know of an inference that has ended without a word, and set what waited for its word; on the loop."""
        self.running -= 1
        self.hear()

    def add(self, done: trio.Event) -> None:
        """Have an event set on the loop, now or with later ones; called by any thread."""
        self._ended.append(done)
        waiting = len(self._ended)
        # More than the device can run are left with it, so that another end is near.
        if (
            self._token is None
            or self._woken
            or (waiting <= self.most_waiting and self.running - waiting > self.side_by_side)
        ):
            return
        self._woken = True
        try:
            self._token.run_sync_soon(self.hear)
        except trio.RunFinishedError:
            return

    def hear(self) -> None:
        """Set all events that wait; on the loop."""
        # In this order: what is appended from here on wakes the loop again, or is still found.
        self._woken = False
        ended = self._ended
        while ended:
            # Too few for a moment at the most, at which the loop is woken once in vain.
            self.running -= 1
            ended.popleft().set()


class Completion:
    """The end of one request's inference; what OpenVINO calls.

    It is apart from the request because that keeps its callback alive in a way that Python's garbage collector cannot
    see: a callback that leads back to the request would leak both.

    Attributes:
        done: is set on the loop when the inference has succeeded, and only then by OpenVINO.
        at: when it succeeded, by ``perf_counter``; 0 until then.
        free_at: when its stream was done with the one before.
    """

    __slots__ = ("_to", "at", "done", "free_at")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.at = self.free_at = 0.0
        self._to: CompletionQueue | None = None

    def expect(self, queue: CompletionQueue) -> trio.Event:
        """Begin to wait for the next inference, whose end is told to a queue."""
        self._to = queue
        if not queue.has_begun:
            queue.begin()
        queue.running += 1
        self.at = self.free_at = 0.0
        self.done = trio.Event()
        return self.done

    def __call__(self, _: Any) -> None:
        """Be called by OpenVINO, into whose thread no exception must get out."""
        self.at = perf_counter()
        if not _calling_thread.is_kept:
            _calling_thread.keep()
        to, self._to = self._to, None
        if to is not None:
            self.free_at = to.ends(self.at)
            # Runs that nobody waits for, as those that mend a model, are told to nobody.
            to.add(self.done)


# ----------------------------------------------------------------------
# One infer request: its inputs, its run, its outputs, and how it is mended after a failure
# ----------------------------------------------------------------------

_NO_INPUTS: Final[dict[int, ov.Tensor]] = {}
_infer: Final = BareRequest.infer
_start: Final = BareRequest.start_async
"""OpenVINO's own methods have a look at what inputs are given, which here are none: they are set before."""
_UNLIKELY: Final = 7919
_KEPT_BYTES: Final = 16 * 1024
"""Inputs up to which are copied into memory of a request's own."""
_kept: Final[list[ov.InferRequest]] = []
"""Requests that OpenVINO may still run from a queue of its own, and that therefore must never be freed."""


class Blocking(Enum):
    """How a slot infers on the calling thread; ``docs/openvino_defects.md`` says why there are three ways."""

    SYNCHRONOUS = auto()
    """By OpenVINO's synchronous call, which reports failures, or cannot have any."""
    MARKED = auto()
    """By the same where it loses failures, which the shapes of the outputs tell; on one thread only, ever."""
    QUEUED = auto()
    """By a thread of OpenVINO's, which is waited for."""


class LostFailure(ModelFailure):
    """The inference failed, and OpenVINO does not tell why; it does when it is asked the other way."""


def marks_of(signature: ModelSignature) -> list[tuple[int, ov.Shape]] | None:
    """Give shapes without elements that no output has behind a success, by port; None if that cannot be told.

    OpenVINO sets the shapes of open outputs after all operations have run.  An output that has the shape all the same
    is taken for a failure, and answered the other way.
    """
    marks = []
    for port, spec in zip(signature.output_ports, signature.outputs, strict=True):
        if spec.datatype is BYTES or port in signature.unranked_outputs:
            return None
        if not all(dim.is_fixed for dim in spec.shape):
            marks.append((port, ov.Shape([0] + [0 if dim.is_fixed else _UNLIKELY for dim in spec.shape[1:]])))
    return marks or None


class Slot:
    """One infer request.

    Between inferences it holds tensors of its own, so that no caller's memory is held longer than its call.

    Args:
        model: the compiled model, which may have other slots.
        signature: its inputs and outputs.
        blocking: how :meth:`infer` runs.

    Attributes:
        request: OpenVINO's.
        model: the one that it is a request of.
        broken: why nothing may run, or an empty text.
    """

    __slots__ = (
        "_arrays",
        "_blocking",
        "_completion",
        "_has_views",
        "_idle",
        "_marked",
        "_marks",
        "_may_keep",
        "_own",
        "_results",
        "_signature",
        "_stuck",
        "broken",
        "model",
        "request",
    )

    def __init__(self, model: ov.CompiledModel, signature: ModelSignature, blocking: Blocking) -> None:
        self._blocking = blocking
        self._marks = marks_of(signature) if blocking is Blocking.MARKED else None
        self._stuck = False
        self.broken = ""
        self._signature = signature
        self._idle = [idle_tensor(spec) for spec in signature.inputs]
        self._arrays: Sequence[Array] = ()
        self._own: Sequence[Array] | None = None
        self._may_keep = all(spec.datatype is not BYTES for spec in signature.inputs)
        self._has_views = all(spec.datatype is not BYTES for spec in signature.outputs)
        self._results: Sequence[Array] = ()
        self._completion = Completion()
        self._create(model)

    @property
    def is_queued(self) -> bool:
        """Whether :meth:`infer` has a thread of OpenVINO's infer, however many streams there are."""
        return self._blocking is Blocking.QUEUED

    def attach(self, model: ov.CompiledModel) -> None:
        """Become a request of this model; nothing may run."""
        self.keep_if_stuck()
        self._create(model)
        self.broken = ""

    def _create(self, model: ov.CompiledModel) -> None:
        request: ov.InferRequest = model.create_infer_request()
        request.set_callback(self._completion, None)
        # To have a tensor given anew for each inference costs as much as to mark it.
        self._marked = [(request.get_output_tensor(port), mark) for port, mark in self._marks or ()]
        self._own = None
        self.model = model
        self.request = request

    def keep_if_stuck(self) -> None:
        """See to it that OpenVINO finds a request that it would still run."""
        if self._stuck:
            _kept.append(self.request)
            self._stuck = False

    def bind(self, arrays: Sequence[Array]) -> None:
        """Set the inputs, which are kept alive until :meth:`unbind`.

        Small ones are copied, into the same memory as long as their shapes stay: to give OpenVINO a tensor, and to
        take it away again, costs more than that.

        Raises:
            ModelFailure: OpenVINO refuses them, or the model is broken.
        """
        if self.broken:
            raise ModelFailure(f"The model failed and cannot be loaded again: {self.broken}")
        if self._own is not None and _copy_into(self._own, arrays):
            return
        # OpenVINO has what was set before until it is given something else.
        before, self._own = self._own, None
        keeps = self._may_keep and sum([array.nbytes for array in arrays]) <= _KEPT_BYTES
        self._arrays = [np.array(array, order="C") for array in arrays] if keeps else arrays
        signature = self._signature
        try:
            tensors = [to_tensor(array, spec) for array, spec in zip(self._arrays, signature.inputs, strict=True)]
            set_inputs(self.request, signature.input_ports, tensors)
        except OPENVINO_ERRORS as error:
            set_inputs(self.request, signature.input_ports, self._idle)
            raise ModelFailure(f"OpenVINO refuses the inputs: {reason(error)}") from error
        del before
        if keeps:
            self._own = self._arrays

    def unbind(self) -> None:
        """Let go of the caller's inputs."""
        if self._own is None or self._stuck:
            self._own = None
            set_inputs(self.request, self._signature.input_ports, self._idle)
        self._arrays = ()

    def infer(self) -> None:
        """Infer on the calling thread, other threads running meanwhile.

        Raises:
            ModelFailure: the inference failed.
        """
        request, self._results = self.request, ()
        try:
            if self._blocking is Blocking.QUEUED:
                request.start_async()
                request.wait()
                return
            for tensor, mark in self._marked:
                tensor.set_shape(mark)
            results = _infer(request, _NO_INPUTS, share_outputs=True, decode_strings=False)
            if self._has_views and len(results) == len(self._signature.outputs):
                self._results = [*results.values()]
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"Inference failed: {reason(error)}") from error
        for tensor, mark in self._marked:
            # Looked at where it was set: were it another tensor than OpenVINO fills, nothing would pass for a success.
            if not tensor.get_size() and tensor.get_shape() == mark:
                self._stuck = True
                raise LostFailure("Inference failed")
        self._stuck = False

    def mends(self) -> bool:
        """Run twice on small inputs, of different shapes; gives whether the stream that ran them is sound again.

        What a failure leaves behind is gone once every operation has seen another shape (and so is the run that failed,
        which a thread's own queue keeps until the next one succeeds).
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

    def start(self, ends: CompletionQueue) -> trio.Event:
        """Start an inference on OpenVINO's threads; the event is set when it has succeeded, and only then.

        Args:
            ends: where the end is told; it does not hear of others than successes.

        Raises:
            ModelFailure: it could not be started.
        """
        done, self._results = self._completion.expect(ends), ()
        try:
            _start(self.request, _NO_INPUTS, None)
        except OPENVINO_ERRORS as error:
            ends.miss()
            raise ModelFailure(f"Inference failed: {reason(error)}") from error
        return done

    @property
    def ended_at(self) -> float:
        """When the inference that was started last succeeded, by ``perf_counter``; 0 if it has not."""
        return self._completion.at

    @property
    def ran(self) -> tuple[float, float]:
        """When its stream was done with the inference before, and when it succeeded; 0 if it has not."""
        return self._completion.free_at, self._completion.at

    def has_failed(self) -> bool:
        """Tell whether the inference that was started last has failed; at once."""
        if self._completion.at:
            return False
        try:
            self.request.wait_for(0)
        except OPENVINO_ERRORS:
            return True
        return False

    def outputs(self, most_bytes: float = math.inf, cuts: Cuts = NO_CUTS) -> list[Array]:
        """Copy the outputs, in the order of the signature, but for what is cut off; blocking while that takes.

        Raises:
            PayloadTooLarge: they are larger than that together.
            ModelFailure: an output has not the shape that is to be cut.
        """
        if self._results and not cuts and most_bytes == math.inf:
            return self._copied_results()
        tensors = self._output_tensors()
        if cuts:
            return self._cut_outputs(tensors, most_bytes, cuts)
        if most_bytes != math.inf and (size := _size_of(tensors)) > most_bytes:
            raise PayloadTooLarge.of_outputs(size, most_bytes)
        return [from_tensor(tensor, spec) for tensor, spec in zip(tensors, self._signature.outputs, strict=True)]

    def _copied_results(self) -> list[Array]:
        """Copy what OpenVINO gives with the end of an inference: views of its tensors, in the order of its ports."""
        results, self._results = self._results, ()
        signature, copies = self._signature, []
        for port, spec in zip(signature.output_ports, signature.outputs, strict=True):
            copy = results[port].copy()
            copies.append(copy if copy.dtype == spec.datatype.numpy else copy.view(spec.datatype.numpy))
        return copies

    def _cut_outputs(self, tensors: Sequence[ov.Tensor], most_bytes: float, cuts: Cuts) -> list[Array]:
        specs = self._signature.outputs
        views = [
            cut_view(view_of(tensor, spec), cuts.get(position, ()), spec.name)
            for position, (tensor, spec) in enumerate(zip(tensors, specs, strict=True))
        ]
        if (size := sum([view.nbytes for view in views])) > most_bytes:
            raise PayloadTooLarge.of_outputs(size, most_bytes)
        return [view.copy(order="C") for view in views]

    @property
    def output_bytes(self) -> int:
        """How much there is to copy; of strings only their number is known."""
        return _size_of(self._output_tensors())

    def _output_tensors(self) -> list[ov.Tensor]:
        return [self.request.get_output_tensor(port) for port in self._signature.output_ports]


def _copy_into(own: Sequence[Array], arrays: Sequence[Array]) -> bool:
    """Copy arrays into others; False if one is of another kind, and some may not have been copied."""
    if len(own) != len(arrays):
        return False
    for into, array in zip(own, arrays, strict=True):
        if array.shape != into.shape or array.dtype != into.dtype:
            return False
        into[...] = array
    return True


def _size_of(tensors: Sequence[ov.Tensor]) -> int:
    return sum([tensor.byte_size for tensor in tensors])


# ----------------------------------------------------------------------
# A fixed pool of infer requests that callers take in turn; it lives as long as its compiled model
# ----------------------------------------------------------------------


class _Turn:
    """The place of a caller that waits."""

    slot: Slot


class RequestPool:
    """Hands out slots, first come, first served.

    A memory channel would do the same in three times the steps.

    Attributes:
        size: how many there are.
        active: how many are in use.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.size = len(slots)
        self.active = 0
        self._free = deque(slots)
        self._callers: dict[trio.lowlevel.Task, _Turn] = {}

    @property
    def waiting(self) -> int:
        """How many callers wait for a slot."""
        return len(self._callers)

    async def acquire(self) -> Slot:
        """Take a slot, which the caller owns until it releases it.

        Cancellation: while waiting; then no slot is taken.
        """
        slot = self._free.popleft() if self._free else await self._turn()
        self.active += 1
        return slot

    async def _turn(self) -> Slot:
        task, turn = trio.lowlevel.current_task(), _Turn()
        self._callers[task] = turn

        def give_up(_raise_cancel: object) -> trio.lowlevel.Abort:
            del self._callers[task]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)
        return turn.slot

    def add(self, slot: Slot) -> None:
        """Have one slot more."""
        self.size += 1
        self.active += 1
        self.release(slot)

    def drop(self) -> None:
        """Have one slot less: one that the caller has taken, and does not give back."""
        self.size -= 1
        self.active -= 1

    def release(self, slot: Slot) -> None:
        """Give a slot back, to the caller that has waited longest if there is one."""
        self.active -= 1
        if not self._callers:
            self._free.append(slot)
            return
        task = next(iter(self._callers))
        self._callers.pop(task).slot = slot
        trio.lowlevel.reschedule(task)
