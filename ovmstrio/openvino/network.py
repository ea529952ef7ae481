"""Run inferences of one compiled model: on the event loop when they are short, through the pool otherwise.

OpenVINO's Python callback is called after a success only, not after a failure or a cancellation.  So a run that has
not called back in good time is waited for by a worker thread as well, and learns from there how it ended.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final

import trio

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.events import CallEvent
from ovmstrio.core.hooks import NULL_HOOKS, ServableHooks
from ovmstrio.core.tensor import Array
from ovmstrio.openvino.compile import Compiled
from ovmstrio.openvino.model_state import StateChange
from ovmstrio.openvino.pool import RequestPool, Slot
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason

__all__ = ["BlockingNetwork", "Network"]

_LEAST_PATIENCE_SECONDS: Final = 0.02
_PATIENCE_FACTOR: Final = 3
_WEIGHT_OF_LAST: Final = 0.125
_LONG_INLINE_SECONDS: Final = 0.02
_AWAY_FACTOR: Final = 500
"""An inference that held the event loop up keeps others from it for so many times as long."""
_COPIED_AT_ONCE: Final = 2 * 2**20
"""Bytes whose copy takes about a millisecond, page faults included."""


class Network:
    """A compiled model with its infer requests; made on the event loop, out of what :func:`compile_model` gives."""

    def __init__(self, compiled: Compiled, hooks: ServableHooks = NULL_HOOKS) -> None:
        self.signature = compiled.signature
        self.variables = compiled.variables
        self._timing = compiled.timing
        self._placement = compiled.placement
        self._away_until = 0.0
        self._hooks = hooks
        self._compile_again = compiled.compile_again
        self._may_fail = compiled.may_fail
        self.pool = RequestPool(compiled.make_slots())
        # A model that may fail runs one request at a time, so that its inline runs take their turn in the pool.
        self._inline_slot = None if compiled.may_fail else compiled.make_slot()
        self._threads = trio.CapacityLimiter(2 * self.pool.size)
        median = compiled.timing.median_seconds if compiled.timing is not None else 0.0
        # Requests that run side by side share the device, and each takes so much longer.
        self._usual_seconds = median * self.pool.size
        hooks.set_streams(compiled.streams)
        hooks.set_pool(self.pool.size, 0)

    @property
    def runs_inline(self) -> bool:
        """Whether requests of the size that was measured run on the event loop."""
        timing = self._timing
        return timing is not None and self._placement.is_inline(timing.input_bytes)

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

        Raises:
            PayloadTooLarge: the outputs are larger than ``most_bytes`` together; what the model remembers stays.
            ModelFailure: OpenVINO failed on these inputs.

        Cancellation: while waiting for a request of the pool, which is then not taken; while inferring, which OpenVINO
        is asked to stop, and this returns when it has.  A short inference on the event loop has no checkpoint.
        """
        inline = self._placement.is_inline(sum([array.nbytes for array in arrays])) and not self._is_kept_away()
        if inline and self._inline_slot is not None:
            return self._infer_inline(self._inline_slot, arrays, change, event, most_bytes)
        begin = time.perf_counter()
        slot = await self.pool.acquire()
        try:
            self._hooks.set_pool(self.pool.size, self.pool.active)
            start = time.perf_counter()
            self._hooks.wait_time(start - begin)
            await self._run(slot, arrays, change, inline=inline)
            outputs = slot.outputs(most_bytes) if inline else await self._copied(slot, most_bytes)
            if change is not None:
                change.leave(slot.request)
            taken = time.perf_counter() - start
            # Inputs of open shapes may take far longer than the ones that the model was first run on.
            self._usual_seconds += _WEIGHT_OF_LAST * (taken - self._usual_seconds)
            self._hooks.inference_time(taken)
            if event is not None:
                event.queue_seconds += start - begin
                event.compute_seconds += taken
            return outputs
        finally:
            slot.unbind()
            self.pool.release(slot)
            self._hooks.set_pool(self.pool.size, self.pool.active)

    async def _copied(self, slot: Slot, most_bytes: float) -> list[Array]:
        """Copy the outputs, in a thread where that takes long."""
        if slot.output_bytes <= _COPIED_AT_ONCE:
            return slot.outputs(most_bytes)
        return await trio.to_thread.run_sync(slot.outputs, most_bytes, limiter=self._threads)

    def _infer_inline(
        self,
        slot: Slot,
        arrays: Sequence[Array],
        change: StateChange | None,
        event: CallEvent | None,
        most_bytes: float,
    ) -> list[Array]:
        self._hooks.wait_time(0.0)
        begin, begin_of_work = time.perf_counter(), time.thread_time()
        try:
            slot.bind(arrays)
            if change is not None:
                change.enter(slot.request)
            slot.infer()
            outputs = slot.outputs(most_bytes)
            if change is not None:
                change.leave(slot.request)
        finally:
            slot.unbind()
        taken = time.perf_counter() - begin
        # A thread that others keep from the processor has not worked.
        if taken > _LONG_INLINE_SECONDS and time.thread_time() - begin_of_work > _LONG_INLINE_SECONDS:
            self._away_until = begin + _AWAY_FACTOR * taken
        self._hooks.inference_time(taken)
        if event is not None:
            event.compute_seconds += taken
        return outputs

    def _is_kept_away(self) -> bool:
        """Tell whether an inference on the event loop has lately held that up."""
        if self._away_until and time.perf_counter() > self._away_until:
            self._away_until = 0.0
        return bool(self._away_until)

    async def _run(self, slot: Slot, arrays: Sequence[Array], change: StateChange | None, *, inline: bool) -> None:
        try:
            slot.bind(arrays)
            if change is not None:
                change.enter(slot.request)
            if inline:
                slot.infer()
            else:
                await self._run_on_device(slot)
        except (ModelFailure, trio.Cancelled):
            slot.request.cancel()
            with trio.CancelScope(shield=True):
                await self._settle(slot)
            raise

    async def _run_on_device(self, slot: Slot) -> None:
        done = slot.start()
        with trio.move_on_after(max(_PATIENCE_FACTOR * self._usual_seconds, _LEAST_PATIENCE_SECONDS)):
            await done.wait()
        if not done.is_set():
            await self._wait_in_thread(slot)

    async def _settle(self, slot: Slot) -> None:
        """Wait until OpenVINO has let go of a run that failed or was cancelled, and mend the model."""
        with contextlib.suppress(ModelFailure):
            await self._wait_in_thread(slot)
        if self._may_fail:
            await trio.to_thread.run_sync(slot.recover, self._compile_again, limiter=self._threads)

    async def _wait_in_thread(self, slot: Slot) -> None:
        try:
            await trio.to_thread.run_sync(slot.request.wait, abandon_on_cancel=True, limiter=self._threads)
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"Inference failed: {reason(error)}") from error


class BlockingNetwork:
    """A compiled model with its infer requests, which threads take in turn."""

    def __init__(self, compiled: Compiled) -> None:
        self.signature = compiled.signature
        self._compiled = compiled
        self._idle: SimpleQueue[Slot] = SimpleQueue()
        for slot in compiled.make_slots():
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
            if self._compiled.may_fail:
                slot.recover(self._compiled.compile_again)
            raise
        finally:
            slot.unbind()
            self._idle.put(slot)
