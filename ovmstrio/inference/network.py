"""Inference on one compiled model: on the event loop or through a request pool, as the model's tuner decides.

OpenVINO's Python callback runs after a success only, not after a failure or a cancellation. A worker thread therefore
also waits for a run that has not called back in time, and gets its result or its error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple
from weakref import WeakMethod

import structlog
import trio

from ovmstrio.core.errors import ConfigError, ModelFailure
from ovmstrio.core.events import CallEvent
from ovmstrio.core.hooks import NULL_HOOKS, ServableHooks
from ovmstrio.core.service import LayerTimes
from ovmstrio.core.tensor import Array
from ovmstrio.core.tracing import current_span
from ovmstrio.inference.compiled import CPU_PINNED, Compiled, device_properties, time_layers
from ovmstrio.inference.infer_requests import (
    CompletionQueue,
    InferMode,
    RequestPool,
    Run,
    RunTracker,
    Slot,
    TaintedRunError,
    UnreportedFailure,
    replace_model,
)
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.shape_buckets import NO_SLICES, OutputSlices, PaddedInputs
from ovmstrio.inference.tensors import StateChange
from ovmstrio.inference.tuner import LOOP, SURELY_SHORT_SECONDS, TunerState
from ovmstrio.util.cores import CORES
from ovmstrio.util.deadline_sweeper import wait_within
from ovmstrio.util.load_limit import load_limiter


class InferCall(NamedTuple):
    """Arguments and start time of one :meth:`Network.infer` call."""

    begin: float
    arrays: Sequence[Array]
    nbytes: int
    change: StateChange | None
    event: CallEvent | None
    max_output_bytes: float
    output_slices: OutputSlices

    def record_times(self, hooks: ServableHooks, waited: float, taken: float, ended: float | None = None) -> None:
        """Record queue and compute seconds in metrics, call event and span.

        ``ended`` is the ``perf_counter`` time at which the device finished; None for an inference on the event loop.
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


log = structlog.get_logger(__name__)

_MIN_CALLBACK_WAIT_SECONDS: Final = 0.02
_CALLBACK_WAIT_FACTOR: Final = 3
_AVERAGE_WEIGHT: Final = 0.125
_MAX_INLINE_COPY_BYTES: Final = 2 * 2**20  # copying this many bytes takes about a millisecond, page faults included


class Network:
    """A compiled model with its infer requests; created on the event loop from the result of :func:`compile_model`.

    Args:
        uses_all_cores: whether the model counts as a user of the cores, so that other models give up CPU pinning.

    Attributes:
        tuner: decides where and how the inferences run.
        pool: the infer requests that calls share.
        variables: the state of a stateful model.
    """

    def __init__(self, compiled: Compiled, hooks: ServableHooks = NULL_HOOKS, *, uses_all_cores: bool = True) -> None:
        self.signature = compiled.signature
        self.variables = compiled.variables
        self.tuner = compiled.create_tuner(hooks)
        self.tuner.recompile = WeakMethod(self.recompile)
        self._buckets = compiled.buckets
        self._hooks = hooks
        self._may_fail = compiled.may_fail
        self._slots: list[Slot] = [compiled.create_slot() for _ in range(compiled.nireq)]
        self.pool = RequestPool(self._slots)
        self._long_calls = 0
        self._idle = trio.Event()
        self._completions = CompletionQueue(compiled.concurrency, compiled.streams)
        self._runs = RunTracker(self._completions, self.tuner, may_fail=compiled.may_fail)
        self._has_small_outputs = (
            compiled.signature.has_fixed_outputs and compiled.signature.output_bytes <= _MAX_INLINE_COPY_BYTES
        )
        self._threads = trio.CapacityLimiter(2 * self.pool.size)
        median = compiled.timing.median_seconds if compiled.timing is not None else 0.0
        # Requests that run side by side share the device, and each takes so much longer.
        self._average_seconds = median * self.pool.size
        self._device_seconds = median
        self._use(compiled)
        hooks.set_pool(self.pool.size, 0)
        hooks.set_memory("weights", compiled.weight_bytes)
        hooks.set_memory("outputs", self.signature.output_bytes * (self.pool.size + 1))
        hooks.set_execution_mode(inline=self.runs_inline, changed=False)
        if compiled.is_pinned is not None:
            hooks.set_cpu_pinning(to_cores=compiled.is_pinned, changed=False)
        if uses_all_cores:
            CORES.users.add(self.tuner)

    def _use(self, compiled: Compiled) -> None:
        self._inline_slot = compiled.create_inline_slot()
        self._compile_inline_replacement = compiled.loop.compile_replacement if compiled.loop is not None else None
        self._model = compiled.model
        self._device = device_properties(compiled.model)
        self._compile_replacement, self._compile_profiled = compiled.compile_replacement, compiled.compile_profiled
        self._recompile = compiled.recompile
        self._set_streams(compiled.streams)

    def _set_streams(self, streams: int) -> None:
        has_own_model = self._compile_inline_replacement is not None
        self._loop_may_share = not self._may_fail or has_own_model
        # Calls that wait for the pool may run inline if the loop now has its own stream.
        self._idle.set()
        self._idle = trio.Event()
        computes_on_loop = (streams == 1 or has_own_model) and not self._inline_slot.is_queued
        self.tuner.set_streams(streams, computes_on_loop=computes_on_loop)

    @property
    def facts(self) -> dict[str, Any]:
        """Device properties, state and current execution mode, for introspection."""
        return {
            **self._device,
            "streams": self.tuner.streams,
            "infer requests": self.pool.size,
            "runs": "on the event loop" if self.runs_inline else "on OpenVINO's threads",
            "state": self.tuner.state.value,
            "weights": {"bytes": self.tuner.weight_bytes},
        }

    @property
    def concurrency(self) -> int:
        """Return the number of inferences that OpenVINO runs at once; more wait in its queue."""
        return self._completions.concurrency

    @property
    def runs_inline(self) -> bool:
        """Return whether requests of the measured size run on the event loop."""
        return self.tuner.is_inline_by_default

    async def layer_times(self, seconds: float) -> LayerTimes:
        """Measure execution time per layer; see ``LayeredServable``."""
        clock = partial(time_layers, self._compile_profiled, self.signature, seconds)
        return await trio.to_thread.run_sync(clock, abandon_on_cancel=True, limiter=load_limiter())

    async def infer(
        self,
        arrays: Sequence[Array],
        state_change: StateChange | None = None,
        event: CallEvent | None = None,
        max_output_bytes: float = math.inf,
    ) -> list[Array]:
        """Run one inference and return outputs that the caller owns, in signature order.

        If the model has buckets, the inputs are padded and the padding is removed from the outputs.

        Args:
            arrays: inputs in signature order; must not change until this returns.
            state_change: model state to restore before and save after the run; without it the state of any earlier run
                remains.
            event: record that receives queue and compute time.
            max_output_bytes: limit for the sum of output bytes.

        Raises:
            InvalidRequest: the inputs do not fit the buckets.
            PayloadTooLarge: the outputs exceed ``max_output_bytes``; the model state is unchanged.
            ModelFailure: OpenVINO failed on these inputs.

        Cancellation: a waiting call takes no request. A running inference is stopped if that affects no other call;
            this returns when it has ended. An inference on the event loop has no checkpoint once it has started.
        """
        begin, output_slices = time.perf_counter(), NO_SLICES
        if self._buckets is not None:
            arrays, output_slices = await self._pad(self._buckets.fit(arrays))
        size = 0
        for array in arrays:
            size += array.nbytes
        call = InferCall(begin, arrays, size, state_change, event, max_output_bytes, output_slices)
        tuner = self.tuner
        inline = tuner.is_inline(size)
        if inline and tuner.fills_cores and tuner.leaves_contended_loop(self.pool.active + self.pool.waiting):
            return await self._infer_in_pool(call, short=False)
        may_wait = tuner.fills_cores or self.pool.active
        if inline and (await self._loop_is_free() if may_wait else self._loop_may_run()):
            try:
                return self._infer_inline(call, self._inline_slot)
            except UnreportedFailure:
                await self._recover_inline()
            except ModelFailure:
                if self._may_fail:
                    await self._recover_inline()
                raise
            if self._compile_inline_replacement is not None:
                return await self._infer_for_error_message(call)
        return await self._infer_in_pool(call, short=inline)

    async def recompile(self) -> None:
        """Recompile the model as its tuner decided, pinned or not as :data:`CORES` says.

        Running inferences finish on the old model. If compilation fails, or a failed model was replaced meanwhile,
        nothing changes.

        Cancellation: at once; the new model is dropped.
        """
        tuner = self.tuner
        had_lost, concurrency = tuner.has_lost_streams, tuner.target
        if tuner.is_pinned is None and not tuner.max_concurrency and not had_lost:
            return
        before, streams, was_shared = self._model, tuner.streams, CORES.is_shared
        try:
            build = partial(self._recompile, concurrency)
            compiled = await trio.to_thread.run_sync(build, abandon_on_cancel=True, limiter=load_limiter())
            while not tuner.is_healthy:
                await tuner.wait_healthy()
            has_failed = had_lost and not tuner.are_streams_due
            if self._model is not before or tuner.streams != streams or has_failed:
                return
            self._use(compiled)
        except (ConfigError, MemoryError, *OPENVINO_ERRORS) as error:
            log.warning("model recompilation failed, previous model kept", reason=openvino_error_message(error))
            tuner.fail_recompilation()
            return
        if not compiled.is_for_loop and compiled.streams != streams:
            tuner.place(compiled.placement)
        self._completions.configure(compiled.concurrency, compiled.streams)
        self._hooks.set_execution_mode(inline=self.runs_inline, changed=True)
        # A model of one thread is never pinned.
        tuner.finish_recompilation(
            concurrency,
            is_pinned=compiled.is_pinned if compiled.is_for_loop or had_lost else tuner.is_pinned,
            is_bound=self._device.get(CPU_PINNED) == "yes",
            was_shared=was_shared,
        )
        await self._resize_pool(compiled)

    async def _resize_pool(self, compiled: Compiled) -> None:
        try:
            while self.pool.size > compiled.nireq:
                self._slots.remove(await self._acquire())
                self.pool.drop()
            for _ in range(self.pool.size - self.pool.active):
                self.pool.release(await self._acquire())
            while self.pool.size < compiled.nireq:
                self._slots.append(compiled.create_slot())
                self.pool.add(self._slots[-1])
        except (MemoryError, ModelFailure, *OPENVINO_ERRORS) as error:
            log.warning("infer requests not recreated, retried on next use", reason=openvino_error_message(error))
        self._threads.total_tokens = 2 * self.pool.size
        self._hooks.set_pool(self.pool.size, self.pool.active)
        self._hooks.set_memory("outputs", self.signature.output_bytes * (self.pool.size + 1))

    async def _pad(self, fitted: PaddedInputs) -> tuple[Sequence[Array], OutputSlices]:
        self._hooks.record_padding(fitted.fit, fitted.given, fitted.added)
        if fitted.padded_bytes <= _MAX_INLINE_COPY_BYTES:
            return fitted.filled(), fitted.output_slices
        return await trio.to_thread.run_sync(fitted.filled, limiter=self._threads), fitted.output_slices

    async def _infer_in_pool(self, call: InferCall, *, short: bool) -> list[Array]:
        if not short:
            self._long_calls += 1
            self._wake_waiting_calls()
        try:
            while True:
                slot = await self._acquire()
                try:
                    return await self._infer_on_device(slot, call)
                except TaintedRunError:
                    continue
                finally:
                    slot.unbind()
                    self._release(slot)
                    self._wake_waiting_calls()
                    self._hooks.set_pool(self.pool.size, self.pool.active)
        finally:
            self._long_calls -= not short

    def _is_loop_free_soon(self) -> bool:
        """Return whether the loop may infer soon: the pool runs short inferences only."""
        return (
            not self._loop_may_share
            and self.pool.active > 0
            and not self._long_calls
            and self.tuner.loop_state is not TunerState.BLOCKED
        )

    def _wake_waiting_calls(self) -> None:
        if not self._loop_may_share and not self._is_loop_free_soon():
            self._idle.set()
            self._idle = trio.Event()

    async def _loop_is_free(self) -> bool:
        """Wait while the loop may infer soon or other tasks are due; return whether it may infer now."""
        if self.tuner.fills_cores and self.tuner.is_loop_overdue:
            await trio.lowlevel.checkpoint()
        while not self._loop_may_share and self._is_loop_free_soon():
            await self._idle.wait()
        return self._loop_may_run()

    def _loop_may_run(self) -> bool:
        """Return whether the event loop may infer now.

        It must not while requests that may fail run on the same stream, because it would learn of a failure too late.
        """
        if self.tuner.loop_state is not LOOP and not self.tuner.may_use_loop():
            return False
        return self._loop_may_share or not self.pool.active

    async def _infer_for_error_message(self, call: InferCall) -> list[Array]:
        """Repeat a failed inference in a mode that reports the reason, on the loop's own model."""
        if self._inline_slot.broken:
            return await self._infer_in_pool(call, short=True)
        try:
            return self._infer_inline(call, Slot(self._inline_slot.model, self.signature, InferMode.QUEUED))
        except ModelFailure:
            await self._recover_inline()
            raise

    def _infer_inline(self, call: InferCall, slot: Slot) -> list[Array]:
        change, tuner = call.change, self.tuner
        begin, cpu_before = time.perf_counter(), time.thread_time() if tuner.cpu_timings_left else None
        try:
            slot.bind(call.arrays)
            if change is not None:
                change.enter(slot.request)
            slot.infer()
            outputs = slot.outputs(call.max_output_bytes, call.output_slices)
            if change is not None:
                change.leave(slot.request)
        finally:
            slot.unbind()
        taken = time.perf_counter() - begin
        if taken < SURELY_SHORT_SECONDS:
            tuner.record(call.nbytes, taken, on_loop=True)
        else:
            tuner.record_long(call.nbytes, begin, taken, cpu_before)
        waited = begin - call.begin if tuner.fills_cores else 0.0
        call.record_times(self._hooks, waited, taken)
        return outputs

    async def _acquire(self) -> Slot:
        """Acquire a slot of a healthy model; ModelFailure if OpenVINO cannot create its request again."""
        while True:
            if not self.tuner.is_healthy:
                await self.tuner.wait_healthy()
            slot = await self.pool.acquire()
            if self.tuner.is_healthy:
                if slot.model is not self._model:
                    self._reattach(slot)
                return slot
            self.pool.release(slot)

    def _reattach(self, slot: Slot) -> None:
        try:
            slot.attach(self._model)
        except (MemoryError, *OPENVINO_ERRORS) as error:
            self.pool.release(slot)
            raise ModelFailure(f"OpenVINO cannot create an infer request: {openvino_error_message(error)}") from error

    def _release(self, slot: Slot) -> None:
        """Release a slot to the pool, attached to the current model.

        An unused slot would otherwise keep the old model alive. If attaching fails, :meth:`_acquire` retries.
        """
        if slot.model is not self._model and self.tuner.is_healthy:
            with suppress(MemoryError, *OPENVINO_ERRORS):
                slot.attach(self._model)
        self.pool.release(slot)

    async def _infer_on_device(self, slot: Slot, call: InferCall) -> list[Array]:
        self._hooks.set_pool(self.pool.size, self.pool.active)
        start = time.perf_counter()
        try:
            slot.bind(call.arrays)
        except ModelFailure:
            if slot.broken:
                await self._recover(slot)
            raise
        if call.change is not None:
            call.change.enter(slot.request)
        await self._run(slot)
        # It started when it was submitted or when its stream finished the previous run, whichever is later.
        free_at, ended = slot.ran
        ended = ended or time.perf_counter()
        started = min(max(start, free_at), ended)
        if self._compile_inline_replacement is None:
            self.tuner.record(call.nbytes, ended - started, on_loop=False)
        is_small = self._has_small_outputs
        outputs = (
            slot.outputs(call.max_output_bytes, call.output_slices)
            if is_small
            else await self._copy_outputs(slot, call)
        )
        if call.change is not None:
            call.change.leave(slot.request)
        # Real inputs of dynamic shape may take far longer than the warm-up inputs.
        self._average_seconds += _AVERAGE_WEIGHT * (ended - start - self._average_seconds)
        self._device_seconds += _AVERAGE_WEIGHT * (ended - started - self._device_seconds)
        waiting = self.pool.waiting
        self._completions.set_batching(self._device_seconds, self.pool.size - 1, has_waiting_calls=waiting > 0)
        if self.tuner.max_concurrency:
            self.tuner.record_concurrency(min(self.pool.active + waiting, self.pool.size), ended - started)
        call.record_times(self._hooks, started - call.begin, ended - started, ended)
        return outputs

    async def _copy_outputs(self, slot: Slot, call: InferCall) -> list[Array]:
        if slot.output_bytes <= _MAX_INLINE_COPY_BYTES:
            return slot.outputs(call.max_output_bytes, call.output_slices)
        return await trio.to_thread.run_sync(
            slot.outputs, call.max_output_bytes, call.output_slices, limiter=self._threads
        )

    async def _run(self, slot: Slot) -> None:
        run = self._runs.start(slot)
        try:
            await wait_within(run.done, max(_CALLBACK_WAIT_FACTOR * self._average_seconds, _MIN_CALLBACK_WAIT_SECONDS))
            if not slot.ended_at:
                await self._wait_in_thread(slot)
            self._runs.check(run)
        except ModelFailure:
            if self._may_fail:
                self._runs.check(run)
                await self._recover(slot, run)
            raise
        except trio.Cancelled:
            await self._abandon(run)
            raise
        finally:
            self._runs.end(run)

    async def _wait_in_thread(self, slot: Slot) -> None:
        try:
            await trio.to_thread.run_sync(slot.request.wait, abandon_on_cancel=True, limiter=self._threads)
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"Inference failed: {openvino_error_message(error)}") from error

    async def _abandon(self, run: Run) -> None:
        """Wait until OpenVINO has finished an unwanted run; stop it if no other run is affected."""
        # A stopped run counts as failed, and a model of several streams would then fall back to one.
        is_stopped = not self._may_fail or (self._runs.alone and self.tuner.streams == 1)
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
                except TaintedRunError:
                    return
                await self._recover(run.slot, run, is_stopped=is_stopped)

    async def _recover_inline(self) -> None:
        """Recover the model on which the event loop infers; if that is its own model, the pool is not affected."""
        if self._compile_inline_replacement is None:
            await self._recover(None)
        elif not self._inline_slot.verify():
            slot = [self._inline_slot]
            self.tuner.block_loop()
            try:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(
                        replace_model, slot, self._compile_inline_replacement, limiter=self._threads
                    )
            finally:
                self.tuner.unblock_loop()

    async def _recover(self, slot: Slot | None, run: Run | None = None, *, is_stopped: bool = False) -> None:
        """Recover the model after a failure, once nothing runs on it; ``slot`` is the one that the caller holds.

        With ``is_stopped`` a cancellation caused the failure, which does not delay stream recovery.

        Cancellation: shielded; takes as long as the running inferences and the verification or reload.
        """
        self._runs.mark_failed(run)
        if not is_stopped:
            self.tuner.delay_streams()
        held: list[Slot] = []
        with trio.CancelScope(shield=True):
            try:
                while len(held) < self.pool.size - (slot is not None):
                    held.append(await self.pool.acquire())
                if not await self._verify(slot):
                    every = (
                        [*self._slots, self._inline_slot] if self._compile_inline_replacement is None else self._slots
                    )
                    await trio.to_thread.run_sync(
                        replace_model, every, self._compile_replacement, limiter=self._threads
                    )
                    self._model = self._slots[0].model
                    self._device = device_properties(self._model)
                    self.tuner.lose_streams()
                    self._set_streams(1)
                    self._completions.configure(self._completions.concurrency, 1)
            finally:
                for each in held:
                    self.pool.release(each)
                self.tuner.end_recovery()
                self._wake_waiting_calls()

    async def _verify(self, slot: Slot | None) -> bool:
        """Return whether the stream that failed passes verification; of several streams the failed one is unknown."""
        if slot is None:
            # The failed run may still be in a queue that only this thread processes.
            return self._inline_slot.verify()
        if self.tuner.streams > 1 or slot.broken:
            return False
        return await trio.to_thread.run_sync(slot.verify, limiter=self._threads)


class BlockingNetwork:
    """A compiled model whose infer requests are shared by threads, without an event loop."""

    def __init__(self, compiled: Compiled) -> None:
        self.signature = compiled.signature
        self._compiled = compiled
        self._idle: SimpleQueue[Slot] = SimpleQueue()
        for slot in compiled.create_isolated_slots():
            self._idle.put(slot)

    def infer(self, arrays: Sequence[Array]) -> list[Array]:
        """Run one inference on ``arrays`` (signature order), waiting for an idle request; ModelFailure if it fails."""
        slot = self._idle.get()
        try:
            slot.bind(arrays)
            slot.infer()
            return slot.outputs()
        except ModelFailure:
            if self._compiled.may_fail and not slot.verify():
                replace_model([slot], self._compiled.compile_replacement)
            raise
        finally:
            slot.unbind()
            self._idle.put(slot)
