"""Run inferences of one compiled model: on the event loop when they are short, through the pool otherwise.

OpenVINO's Python callback is called after a success only, not after a failure or a cancellation.  So a run that has
not called back in good time is waited for by a worker thread as well, and learns from there how it ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import structlog
import trio

from ovmstrio.core.errors import ConfigError, ModelFailure
from ovmstrio.core.events import CallEvent
from ovmstrio.core.hooks import NULL_HOOKS, ServableHooks
from ovmstrio.core.service import LayerTimes
from ovmstrio.core.tensor import Array
from ovmstrio.core.tracing import current_span
from ovmstrio.inference.compiled import BOUND, Compiled, device_facts
from ovmstrio.inference.infer_requests import Blocking, CompletionQueue, LostFailure, RequestPool, Slot
from ovmstrio.inference.layer_times import clock_layers
from ovmstrio.inference.recovery import LostStreams, Run, Runs, SuspectRunError, replace_model
from ovmstrio.inference.runtime import OPENVINO_ERRORS, reason
from ovmstrio.inference.shape_buckets import NO_CUTS, Cuts, Fitted
from ovmstrio.inference.tensors import StateChange
from ovmstrio.inference.tuner import Crowd
from ovmstrio.telemetry.loop_load import LoopLoad, current_loop_load
from ovmstrio.util.cores import CORES
from ovmstrio.util.deadline_sweeper import wait_within
from ovmstrio.util.placement import INLINE_THRESHOLD_SECONDS, load_limiter

__all__ = ["BlockingNetwork", "InferCall", "Network"]

# ----------------------------------------------------------------------
# One call of a network: what it was given, and who is told what became of it
# ----------------------------------------------------------------------


class InferCall(NamedTuple):
    """What :meth:`ovmstrio.inference.network.Network.infer` was given, and when."""

    begin: float
    arrays: Sequence[Array]
    nbytes: int
    change: StateChange | None
    event: CallEvent | None
    most_bytes: float
    cuts: Cuts

    def ran(self, hooks: ServableHooks, waited: float, taken: float, ended: float | None = None) -> None:
        """Tell that it was inferred, and has waited so many seconds before.

        Args:
            hooks: of its servable.
            waited: seconds.
            taken: seconds.
            ended: when OpenVINO's threads were done with it, in seconds of ``perf_counter``; None for the event loop,
                which is done now.
        """
        hooks.inferred(waited, taken)
        if self.event is not None:
            self.event.queue_seconds += waited
            self.event.compute_seconds += taken
        if (span := current_span.get()) is None or not span.is_recorded:
            return
        if ended is None:
            span.add("inference", taken, {"ovmstrio.inference.on": "loop"})
            return
        ended_ago = time.perf_counter() - ended
        span.add("queue", waited, {"ovmstrio.queue.of": "device"}, ended_ago=ended_ago + taken)
        span.add("inference", taken, {"ovmstrio.inference.on": "device"}, ended_ago=ended_ago)


# ----------------------------------------------------------------------
# Run inferences of one compiled model: on the event loop when they are short, through the pool otherwise
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_LEAST_PATIENCE_SECONDS: Final = 0.02
_PATIENCE_FACTOR: Final = 3
_WEIGHT_OF_LAST: Final = 0.125
_LONG_INLINE_SECONDS: Final = 0.02
_SURELY_SHORT_SECONDS: Final = INLINE_THRESHOLD_SECONDS / 2
"""Short enough for the loop however busy that is."""
_TIMED_BEHIND_LONG: Final = 64
"""Of so many inferences behind one that was not short it is asked how long they have worked: one may be longer."""
_AWAY_FACTOR: Final = 500
"""An inference that held the event loop up keeps others from it for so many times as long."""
_COPIED_AT_ONCE: Final = 2 * 2**20
"""Bytes whose copy takes about a millisecond, page faults included."""


class Network:
    """A compiled model with its infer requests; made on the event loop, out of what :func:`compile_model` gives.

    Without ``fills_cores`` it is no reason for others to give up cores that they are bound to, as a tokenizer.

    Attributes:
        side_by_side: how many inferences OpenVINO runs at once; what is beyond that waits in its queue.
        is_pinned: whether its threads are bound to cores; None where that is not for the server to choose.
        weight_bytes: what its weights have.
    """

    def __init__(self, compiled: Compiled, hooks: ServableHooks = NULL_HOOKS, *, fills_cores: bool = True) -> None:
        self.signature = compiled.signature
        self.variables = compiled.variables
        self.side_by_side = compiled.side_by_side
        self._buckets = compiled.buckets
        self._timing = compiled.timing
        self._placement = compiled.placement
        self._holds_loop_up = compiled.placement.limit is not None
        self._crowd = Crowd()
        self._away_until = 0.0
        self._timed = _TIMED_BEHIND_LONG
        self._hooks = hooks
        self._compile_again = compiled.compile_again
        self._compile_timed = compiled.compile_timed
        self._may_fail = compiled.may_fail
        self._model = compiled.model
        self._chosen_anew = compiled.chosen_anew
        self.is_pinned = compiled.is_pinned
        self._slots: list[Slot] = [compiled.make_slot() for _ in range(compiled.nireq)]
        self.pool = RequestPool(self._slots)
        self._inline_slot = compiled.make_inline_slot()
        self._loop_again = compiled.loop.compile_again if compiled.loop is not None else None
        self._long = 0
        self._idle = trio.Event()
        self._completions = CompletionQueue(compiled.side_by_side, compiled.streams)
        self._runs = Runs(self._completions, may_fail=compiled.may_fail)
        self.weight_bytes = compiled.weight_bytes
        self._has_small_outputs = (
            compiled.signature.has_fixed_outputs and compiled.signature.output_bytes <= _COPIED_AT_ONCE
        )
        self._device = device_facts(compiled.model)
        self._threads = trio.CapacityLimiter(2 * self.pool.size)
        median = compiled.timing.median_seconds if compiled.timing is not None else 0.0
        # Requests that run side by side share the device, and each takes so much longer.
        self._usual_seconds = median * self.pool.size
        self._device_seconds = median
        self._demand = compiled.make_demand()
        self._at_once = self._demand.chosen if self._demand is not None else 1
        self._lost = LostStreams()
        self._be_of_streams(compiled.streams)
        hooks.set_pool(self.pool.size, 0)
        hooks.set_memory("weights", compiled.weight_bytes)
        hooks.set_memory("outputs", self.signature.output_bytes * (self.pool.size + 1))
        hooks.placed(inline=self.runs_inline, moved=False)
        if self.is_pinned is not None:
            hooks.bound(to_cores=self.is_pinned, again=False)
        if fills_cores:
            CORES.users.add(self)

    def _be_of_streams(self, streams: int) -> None:
        """Have so many streams; of several the event loop waits for another thread, unless it has one for itself."""
        self._streams = streams
        self._loop_may_share = not self._may_fail or self._loop_again is not None
        # Whoever waits for the pool need not, where the loop has a stream for itself now.
        self._idle.set()
        self._idle = trio.Event()
        self._works_inline = (streams == 1 or self._loop_again is not None) and not self._inline_slot.is_queued
        self._hooks.set_streams(streams)

    @cached_property
    def _loop_load(self) -> LoopLoad:
        """The watcher of the loop that it serves, looked up once."""
        return current_loop_load()

    @property
    def facts(self) -> dict[str, Any]:
        """What it was compiled to, and where it runs now, for those who look."""
        return {
            **self._device,
            "streams": self._streams,
            "infer requests": self.pool.size,
            "runs": "on the event loop" if self.runs_inline else "on OpenVINO's threads",
            "weights": {"bytes": self.weight_bytes},
        }

    @property
    def runs_inline(self) -> bool:
        """Whether requests of the size that was measured run on the event loop."""
        timing = self._timing
        return timing is not None and self._placement.is_inline(timing.input_bytes)

    async def layer_times(self, seconds: float) -> LayerTimes:
        """Time the layers; see ``LayeredServable``."""
        clock = partial(clock_layers, self._compile_timed, self.signature, seconds)
        return await trio.to_thread.run_sync(clock, abandon_on_cancel=True, limiter=load_limiter())

    async def infer(
        self,
        arrays: Sequence[Array],
        change: StateChange | None = None,
        event: CallEvent | None = None,
        most_bytes: float = math.inf,
    ) -> list[Array]:
        """Infer on ``arrays``, in the order of the signature's inputs; gives its outputs, which the caller owns.

        The arrays must stay unchanged until this returns.  ``change`` is what the model remembers before and after;
        without one it remembers what the request of the pool happens to have seen last.  ``event``, if there is one, is
        told how long the call waited and how long the inference took.

        A model with buckets gets inputs padded, and its outputs are what is left without that.

        Raises:
            InvalidRequest: the inputs do not fit the buckets.
            PayloadTooLarge: the outputs are larger than ``most_bytes`` together; what the model remembers stays.
            ModelFailure: OpenVINO failed on these inputs.

        Cancellation: while waiting for a request of the pool, which is then not taken; while inferring, which OpenVINO
        is asked to stop where that hurts nobody else, and this returns when it has ended.  A short inference on the
        event loop has no checkpoint, one of some hundred µs waits for the loop's next turn where this one has lasted
        long.
        """
        begin, cuts = time.perf_counter(), NO_CUTS
        if self._buckets is not None:
            arrays, cuts = await self._padded(self._buckets.fit(arrays))
        size = 0
        for array in arrays:
            size += array.nbytes
        call = InferCall(begin, arrays, size, change, event, most_bytes, cuts)
        inline = self._placement.is_inline(size)
        if inline and self._holds_loop_up and self._leaves_loop_to_others():
            return await self._infer_in_pool(call, short=False)
        may_wait = self._holds_loop_up or self.pool.active
        if inline and (await self._loop_is_free() if may_wait else self._loop_may_run()):
            try:
                return self._infer_inline(call, self._inline_slot)
            except LostFailure:
                await self._mend_loop()
            except ModelFailure:
                if self._may_fail:
                    await self._mend_loop()
                raise
            if self._loop_again is not None:
                return await self._infer_again(call)
        return await self._infer_in_pool(call, short=inline)

    def wants_others(self) -> bool:
        """Tell whether its calls since this was last asked want more inferences side by side, or one at a time again.

        Never where the user has chosen, but for streams that it lost to a failure, once nothing has failed for a while.
        """
        if self._lost.are_lost:
            return self._lost.are_due
        if self._demand is None:
            return False
        self._at_once = self._demand.look()
        return self._at_once != self._demand.chosen

    async def choose_cores(self) -> None:
        """Compile the model again, bound to cores or not as :data:`CORES` says now, and run requests on that from then.

        It is compiled for as many inferences side by side as :meth:`wants_others` has found of use.

        Those that run end on the model that they were begun on.  Nothing changes if it cannot be compiled, or was
        mended meanwhile.

        Cancellation: at once; what is being compiled is dropped.
        """
        was_lost = self._lost.are_lost
        if self.is_pinned is None and self._demand is None and not was_lost:
            return
        before, streams, was_shared, at_once = self._model, self._streams, CORES.is_shared, self._at_once
        build = partial(self._chosen_anew, at_once)
        try:
            compiled = await trio.to_thread.run_sync(build, abandon_on_cancel=True, limiter=load_limiter())
            while not self._runs.is_sound:
                await self._runs.wait_sound()
            has_failed = was_lost and not self._lost.are_due
            if self._model is not before or self._streams != streams or has_failed:
                return
            self._take_over(compiled, is_other=not compiled.is_for_loop and compiled.streams != streams)
        except (ConfigError, MemoryError, *OPENVINO_ERRORS) as error:
            log.warning("model keeps its cores: it cannot be compiled again", reason=reason(error))
            if was_lost:
                self._lost.lose()
            else:
                self._demand = None
            return
        self._lost.regain()
        if self._demand is not None:
            self._demand.chosen = at_once
        if compiled.is_for_loop or was_lost:
            # What has one thread is bound to nothing.
            self.is_pinned = compiled.is_pinned
        if self.is_pinned is not None:
            self._tell_bound(was_shared=was_shared)
        await self._renew_all(compiled)

    def _take_over(self, compiled: Compiled, *, is_other: bool) -> None:
        """Be another compiled model; nobody waits, requests come later, and what was learned of one alike stays."""
        self._inline_slot = compiled.make_inline_slot()
        self._loop_again = compiled.loop.compile_again if compiled.loop is not None else None
        self._model = compiled.model
        self._device = device_facts(compiled.model)
        self._compile_again, self._compile_timed = compiled.compile_again, compiled.compile_timed
        self._chosen_anew = compiled.chosen_anew
        if is_other:
            self._timing, self._placement = compiled.timing, compiled.placement
            self._holds_loop_up = compiled.placement.limit is not None
        self._be_of_streams(compiled.streams)
        self.side_by_side = compiled.side_by_side
        self._completions.be_of(compiled.side_by_side, compiled.streams)
        self._hooks.placed(inline=self.runs_inline, moved=True)

    def _tell_bound(self, *, was_shared: bool) -> None:
        is_bound = self._device.get(BOUND) == "yes"
        self._hooks.bound(to_cores=is_bound, again=True)
        # What OpenVINO binds to no core by itself there is nothing to choose for.
        self.is_pinned = None if not (is_bound or was_shared or CORES.is_shared) else is_bound

    async def _renew_all(self, compiled: Compiled) -> None:
        """Have as many requests as it needs, and those that nobody uses be of what is compiled now, too."""
        try:
            while self.pool.size > compiled.nireq:
                self._slots.remove(await self._acquire())
                self.pool.drop()
            for _ in range(self.pool.size - self.pool.active):
                self.pool.release(await self._acquire())
            while self.pool.size < compiled.nireq:
                self._slots.append(compiled.make_slot())
                self.pool.add(self._slots[-1])
        except (MemoryError, ModelFailure, *OPENVINO_ERRORS) as error:
            log.warning("requests take over what was compiled when they are used", reason=reason(error))
        self._threads.total_tokens = 2 * self.pool.size
        self._hooks.set_pool(self.pool.size, self.pool.active)
        self._hooks.set_memory("outputs", self.signature.output_bytes * (self.pool.size + 1))

    async def _padded(self, fitted: Fitted) -> tuple[Sequence[Array], Cuts]:
        """Pad inputs, in a thread where that takes long."""
        self._hooks.bucketed(fitted.fit, fitted.given, fitted.added)
        if fitted.padded_bytes <= _COPIED_AT_ONCE:
            return fitted.filled(), fitted.cuts
        return await trio.to_thread.run_sync(fitted.filled, limiter=self._threads), fitted.cuts

    async def _infer_in_pool(self, call: InferCall, *, short: bool) -> list[Array]:
        if not short:
            self._long += 1
            self._look_for_idle()
        try:
            while True:
                slot = await self._acquire()
                try:
                    return await self._infer_away(slot, call)
                except SuspectRunError:
                    continue
                finally:
                    slot.unbind()
                    self._give_back(slot)
                    self._look_for_idle()
                    self._hooks.set_pool(self.pool.size, self.pool.active)
        finally:
            self._long -= not short

    def _is_worth_waiting(self) -> bool:
        """Tell whether the loop may infer soon: the pool is busy with what is as short as that, if with anything."""
        return not self._loop_may_share and self.pool.active > 0 and not self._long and not self._away_until

    def _look_for_idle(self) -> None:
        """Wake those who wait for the pool, if they need not any more."""
        if not self._loop_may_share and not self._is_worth_waiting():
            self._idle.set()
            self._idle = trio.Event()

    async def _loop_is_free(self) -> bool:
        """Wait while the loop may infer soon, or others should have their turn; gives whether it may infer now."""
        if self._holds_loop_up and self._loop_load.is_overdue:
            await trio.lowlevel.checkpoint()
        while not self._loop_may_share and self._is_worth_waiting():
            await self._idle.wait()
        return self._loop_may_run()

    def _leaves_loop_to_others(self) -> bool:
        others = self.pool.active + self.pool.waiting
        return self._crowd.leaves(others, loop_is_full=self._loop_load.is_full)

    def _loop_may_run(self) -> bool:
        """Tell whether the event loop may infer now.

        It may not beside requests that may fail on the same stream: it would learn of that too late.
        """
        if self._away_until:
            if time.perf_counter() <= self._away_until:
                return False
            self._away_until = 0.0
        return not self._may_fail or ((self._loop_may_share or not self.pool.active) and self._runs.is_sound)

    async def _infer_again(self, call: InferCall) -> list[Array]:
        """Infer the way that tells why it fails, on the loop's own model: of several streams none is to fail."""
        if self._inline_slot.broken:
            return await self._infer_in_pool(call, short=True)
        try:
            return self._infer_inline(call, Slot(self._inline_slot.model, self.signature, Blocking.QUEUED))
        except ModelFailure:
            await self._mend_loop()
            raise

    def _infer_inline(self, call: InferCall, slot: Slot) -> list[Array]:
        change = call.change
        begin, worked_before = time.perf_counter(), time.thread_time() if self._timed else None
        try:
            slot.bind(call.arrays)
            if change is not None:
                change.enter(slot.request)
            slot.infer()
            outputs = slot.outputs(call.most_bytes, call.cuts)
            if change is not None:
                change.leave(slot.request)
        finally:
            slot.unbind()
        taken = time.perf_counter() - begin
        if taken < _SURELY_SHORT_SECONDS:
            self._timed -= self._timed > 0
            self._learn(call, taken, on_loop=True)
        else:
            self._learn_long(call, begin, taken, worked_before)
            if self._demand is not None:
                self._demand.note(1, taken)
        waited = begin - call.begin if self._holds_loop_up else 0.0
        call.ran(self._hooks, waited, taken)
        return outputs

    def _learn_long(self, call: InferCall, begin: float, taken: float, before: float | None) -> None:
        """Learn of an inference on the loop that was not short, and keep others off if it was long.

        ``before`` is how long its thread had worked when it began; None behind many short ones, as to ask the system
        for that takes longer than what else is noted of an inference.  Such a one keeps nobody off.
        """
        # A thread that others keep from the processor has not worked; one that waits for OpenVINO's has not, either.
        worked = min(taken, time.thread_time() - before) if before is not None and self._works_inline else taken
        self._timed = _TIMED_BEHIND_LONG
        if before is not None and worked > _LONG_INLINE_SECONDS:
            self._away_until = begin + _AWAY_FACTOR * taken
        self._learn(call, worked, on_loop=True)

    def _learn(self, call: InferCall, seconds: float, *, on_loop: bool) -> None:
        """Let the placement know how long an inference took."""
        load = self._loop_load
        limit = load.limit_of_work if self._works_inline else load.limit
        if self._placement.learn(call.nbytes, seconds, limit, on_loop=on_loop):
            self._hooks.placed(inline=self._placement.is_inline(call.nbytes), moved=True)

    async def _acquire(self) -> Slot:
        """Take a request of the pool of a model that is sound.

        Raises:
            ModelFailure: OpenVINO makes no request of what was compiled again; the next caller tries it, too.
        """
        while True:
            await self._runs.wait_sound()
            slot = await self.pool.acquire()
            if self._runs.is_sound:
                self._renew(slot)
                return slot
            self.pool.release(slot)

    def _renew(self, slot: Slot) -> None:
        """Have a request of the pool be one of what is compiled now; it goes back to the pool if that fails."""
        if slot.model is self._model:
            return
        try:
            slot.attach(self._model)
        except (MemoryError, *OPENVINO_ERRORS) as error:
            self.pool.release(slot)
            raise ModelFailure(f"OpenVINO makes no request of the model: {reason(error)}") from error

    def _give_back(self, slot: Slot) -> None:
        """Give a request back to the pool, as one of what is compiled now; one that cannot be made is when it is used.

        Nobody might use it for long, and it would keep what was compiled before.
        """
        if slot.model is not self._model and self._runs.is_sound:
            with suppress(MemoryError, *OPENVINO_ERRORS):
                slot.attach(self._model)
        self.pool.release(slot)

    async def _infer_away(self, slot: Slot, call: InferCall) -> list[Array]:
        self._hooks.set_pool(self.pool.size, self.pool.active)
        start = time.perf_counter()
        try:
            slot.bind(call.arrays)
        except ModelFailure:
            if slot.broken:
                await self._mend(slot)
            raise
        if call.change is not None:
            call.change.enter(slot.request)
        await self._run(slot)
        # It ran from when it was started, or its stream was done with an earlier one.
        free_at, ended = slot.ran
        ended = ended or time.perf_counter()
        started = min(max(start, free_at), ended)
        if self._loop_again is None:
            self._learn(call, ended - started, on_loop=False)
        is_small = self._has_small_outputs
        outputs = slot.outputs(call.most_bytes, call.cuts) if is_small else await self._copied(slot, call)
        if call.change is not None:
            call.change.leave(slot.request)
        # Inputs of open shapes may take far longer than the ones that the model was first run on.
        self._usual_seconds += _WEIGHT_OF_LAST * (ended - start - self._usual_seconds)
        self._device_seconds += _WEIGHT_OF_LAST * (ended - started - self._device_seconds)
        waiting = self.pool.waiting
        self._completions.let_wait(self._device_seconds, self.pool.size - 1, is_crowded=waiting > 0)
        if self._demand is not None:
            self._demand.note(min(self.pool.active + waiting, self.pool.size), ended - started)
        call.ran(self._hooks, started - call.begin, ended - started, ended)
        return outputs

    async def _copied(self, slot: Slot, call: InferCall) -> list[Array]:
        """Copy outputs of open shapes or of many bytes, in a thread where that takes long."""
        if slot.output_bytes <= _COPIED_AT_ONCE:
            return slot.outputs(call.most_bytes, call.cuts)
        return await trio.to_thread.run_sync(slot.outputs, call.most_bytes, call.cuts, limiter=self._threads)

    async def _run(self, slot: Slot) -> None:
        """Infer on OpenVINO's threads.

        Raises:
            ModelFailure: it failed, and would have done so alone.
            SuspectRunError: it ran behind one that failed.
        """
        run = self._runs.start(slot)
        try:
            await self._wait(run)
            self._runs.check(run)
        except ModelFailure:
            if self._may_fail:
                self._runs.check(run)
                await self._mend(slot, run)
            raise
        except trio.Cancelled:
            await self._abandon(run)
            raise
        finally:
            self._runs.end(run)

    async def _wait(self, run: Run) -> None:
        await wait_within(run.done, max(_PATIENCE_FACTOR * self._usual_seconds, _LEAST_PATIENCE_SECONDS))
        if not run.slot.ended_at:
            await self._wait_in_thread(run.slot)

    async def _wait_in_thread(self, slot: Slot) -> None:
        try:
            await trio.to_thread.run_sync(slot.request.wait, abandon_on_cancel=True, limiter=self._threads)
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"Inference failed: {reason(error)}") from error

    async def _abandon(self, run: Run) -> None:
        """Wait until OpenVINO has let go of a run that nobody wants, and stop it if that costs nobody else a run."""
        # What is stopped has failed, after which several streams would be given up for one.
        is_stopped = not self._may_fail or (self._runs.alone and self._streams == 1)
        if is_stopped:
            run.slot.request.cancel()
        with trio.CancelScope(shield=True):
            try:
                await self._wait_in_thread(run.slot)
            except ModelFailure:
                if not self._may_fail:
                    return
                try:
                    self._runs.check(run)
                except SuspectRunError:
                    return
                await self._mend(run.slot, run, is_stopped=is_stopped)

    async def _mend_loop(self) -> None:
        """Make what the event loop infers on as good as new; a model that it has for itself is nobody else's matter.

        Cancellation: as :meth:`_mend`.
        """
        if self._loop_again is None:
            await self._mend(None)
        elif not self._inline_slot.mends():
            slot, self._away_until = [self._inline_slot], math.inf
            try:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(replace_model, slot, self._loop_again, limiter=self._threads)
            finally:
                self._away_until = 0.0

    async def _mend(self, slot: Slot | None, run: Run | None = None, *, is_stopped: bool = False) -> None:
        """Make the model as good as new after a failure, once nothing runs on it; ``slot`` is one that the caller has.

        ``is_stopped`` tells that nothing but a stop made it fail, for which nobody waits longer for lost streams.

        Cancellation: never; it takes as long as the runs that have begun, and some short ones or loading the model.
        """
        self._runs.spoil(run)
        if not is_stopped:
            self._lost.put_off()
        held: list[Slot] = []
        with trio.CancelScope(shield=True):
            try:
                while len(held) < self.pool.size - (slot is not None):
                    held.append(await self.pool.acquire())
                if not await self._runs_again(slot):
                    every = [*self._slots, self._inline_slot] if self._loop_again is None else self._slots
                    await trio.to_thread.run_sync(replace_model, every, self._compile_again, limiter=self._threads)
                    self._model = self._slots[0].model
                    self._device = device_facts(self._model)
                    self._lose_streams()
            finally:
                for each in held:
                    self.pool.release(each)
                self._runs.mended()
                self._look_for_idle()

    def _lose_streams(self) -> None:
        """Be of one stream, which is bound to no core, until nothing has failed for a while."""
        if self._streams > 1:
            seconds = self._lost.lose()
            log.warning("model has one stream for a while: it failed on one of several", seconds=seconds)
            if self.is_pinned is not None:
                self.is_pinned = None
                self._hooks.bound(to_cores=False, again=False)
        self._be_of_streams(1)
        self._completions.be_of(self.side_by_side, 1)

    async def _runs_again(self, slot: Slot | None) -> bool:
        """Have the stream that failed run something else; of several streams nobody knows which one that was."""
        if slot is None:
            # The failure may still wait in a queue that this thread alone works off.
            return self._inline_slot.mends()
        if self._streams > 1 or slot.broken:
            return False
        return await trio.to_thread.run_sync(slot.mends, limiter=self._threads)


# ----------------------------------------------------------------------
# Run inferences of one compiled model from any thread, outside of the event loop
# ----------------------------------------------------------------------


class BlockingNetwork:
    """A compiled model with its infer requests, which threads take in turn."""

    def __init__(self, compiled: Compiled) -> None:
        self.signature = compiled.signature
        self._compiled = compiled
        self._idle: SimpleQueue[Slot] = SimpleQueue()
        for slot in compiled.make_isolated_slots():
            self._idle.put(slot)

    def infer(self, arrays: Sequence[Array]) -> list[Array]:
        """Infer on ``arrays``, in the order of the signature's inputs; waits for an idle request first.

        Raises:
            ModelFailure: OpenVINO failed on these inputs.
        """
        slot = self._idle.get()
        try:
            slot.bind(arrays)
            slot.infer()
            return slot.outputs()
        except ModelFailure:
            if self._compiled.may_fail and not slot.mends():
                replace_model([slot], self._compiled.compile_again)
            raise
        finally:
            slot.unbind()
            self._idle.put(slot)
