"""A fixed pool of infer requests that callers take in turn; it lives as long as its compiled model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import openvino as ov
import structlog
import trio

from ovmstrio.core.datatypes import BYTES
from ovmstrio.core.errors import ConfigError, ModelFailure, PayloadTooLarge
from ovmstrio.core.tensor import Array
from ovmstrio.openvino.ov_tensors import from_tensor, idle_tensor, placeholder, set_inputs, to_tensor
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason
from ovmstrio.openvino.signature import ModelSignature

__all__ = ["RequestPool", "Slot"]

log = structlog.get_logger(__name__)


class _Signal:
    """Brings the end of an inference from OpenVINO's thread to the event loop.

    It is apart from :class:`Slot` because a request keeps its callback alive in a way that Python's garbage collector
    cannot see: a callback that leads back to the request would leak both.
    """

    __slots__ = ("done", "token")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.token: trio.lowlevel.TrioToken | None = None

    def __call__(self, _: Any) -> None:
        """Be called by OpenVINO, into whose thread no exception must get out."""
        if self.token is not None:
            try:
                self.token.run_sync_soon(self.done.set)
            except trio.RunFinishedError:
                return


class Slot:
    """One infer request.

    Between inferences it holds tensors of its own, so that no caller's memory is held longer than its call.

    Args:
        model: the compiled model, which may have other slots.
        signature: its inputs and outputs.
        synchronous: whether :meth:`infer` may use OpenVINO's synchronous call.  OpenVINO 2026.4 loses exceptions of
            that call on a single thread and gives the outputs of an earlier request, so it is only for models that
            cannot fail or have more threads.
    """

    __slots__ = ("_arrays", "_broken", "_idle", "_signal", "_signature", "_synchronous", "request")

    def __init__(self, model: ov.CompiledModel, signature: ModelSignature, *, synchronous: bool) -> None:
        # The synchronous call reads outputs at once; of strings it cannot read an empty tensor (see from_tensor).
        self._synchronous = synchronous and all(spec.datatype is not BYTES for spec in signature.outputs)
        self._broken = ""
        self._signature = signature
        self._idle = [idle_tensor(spec) for spec in signature.inputs]
        self._arrays: Sequence[Array] = ()
        self._signal = _Signal()
        self._attach(model)

    def _attach(self, model: ov.CompiledModel) -> None:
        self.request = model.create_infer_request()
        self.request.set_callback(self._signal, None)

    def bind(self, arrays: Sequence[Array]) -> None:
        """Set the inputs, which are kept alive until :meth:`unbind`.

        Raises:
            ModelFailure: OpenVINO refuses them, or the model is broken.
        """
        if self._broken:
            raise ModelFailure(f"The model failed and cannot be loaded again: {self._broken}")
        self._arrays = arrays
        signature = self._signature
        try:
            tensors = [to_tensor(array, spec) for array, spec in zip(arrays, signature.inputs, strict=True)]
            set_inputs(self.request, signature.input_ports, tensors)
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"OpenVINO refuses the inputs: {reason(error)}") from error

    def unbind(self) -> None:
        """Let go of the inputs."""
        set_inputs(self.request, self._signature.input_ports, self._idle)
        self._arrays = ()

    def infer(self) -> None:
        """Infer on the calling thread, other threads running meanwhile.

        Raises:
            ModelFailure: the inference failed.
        """
        try:
            if self._synchronous:
                self.request.infer(share_inputs=True, share_outputs=True, decode_strings=False)
            else:
                self.request.start_async()
                self.request.wait()
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"Inference failed: {reason(error)}") from error

    def recover(self, compile_again: Callable[[], ov.CompiledModel]) -> None:
        """Leave the model fit for the next request after one that failed; only for a slot that is alone on its model.

        A stream that has seen two different shapes succeed is sound again.  Where it cannot, the model is replaced;
        where that fails, too, every request is refused until it succeeds.
        """
        self._broken = ""
        if self._signature.has_fixed_inputs or [self._runs_on_ones(more) for more in (0, 1, 0)][1:] != [True, True]:
            try:
                self._attach(compile_again())
            except ConfigError as error:
                self._broken = error.message
                log.exception("failed model cannot be loaded again", reason=error.message)
        self.unbind()

    def _runs_on_ones(self, more: int) -> bool:
        try:
            self.bind([placeholder(spec, more) for spec in self._signature.inputs])
            self.infer()
        except ModelFailure:
            return False
        return True

    def start(self) -> trio.Event:
        """Start an inference on OpenVINO's threads; the event is set when it has succeeded, and only then.

        Raises:
            ModelFailure: it could not be started.
        """
        signal = self._signal
        signal.token = trio.lowlevel.current_trio_token()
        signal.done = trio.Event()
        try:
            self.request.start_async()
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"Inference failed: {reason(error)}") from error
        return signal.done

    def outputs(self, most_bytes: float = math.inf) -> list[Array]:
        """Copy the outputs, in the order of the signature; blocking, for as long as that takes.

        Raises:
            PayloadTooLarge: they are larger than that together.
        """
        tensors = self._output_tensors()
        if most_bytes != math.inf and (size := _size_of(tensors)) > most_bytes:
            raise PayloadTooLarge.of_outputs(size, most_bytes)
        return [from_tensor(tensor, spec) for tensor, spec in zip(tensors, self._signature.outputs, strict=True)]

    @property
    def output_bytes(self) -> int:
        """How much there is to copy; of strings only their number is known."""
        return _size_of(self._output_tensors())

    def _output_tensors(self) -> list[ov.Tensor]:
        return [self.request.get_output_tensor(port) for port in self._signature.output_ports]


def _size_of(tensors: Sequence[ov.Tensor]) -> int:
    return sum([tensor.byte_size for tensor in tensors])


class RequestPool:
    """Hands out slots, first come, first served."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.size = len(slots)
        self._give, self._take = trio.open_memory_channel[Slot](len(slots))
        for slot in slots:
            self._give.send_nowait(slot)

    @property
    def active(self) -> int:
        """How many slots are in use."""
        return self.size - self._take.statistics().current_buffer_used

    @property
    def waiting(self) -> int:
        """How many callers wait for a slot."""
        return self._take.statistics().tasks_waiting_receive

    async def acquire(self) -> Slot:
        """Take a slot, which the caller owns until it releases it.

        Cancellation: while waiting; then no slot is taken.
        """
        try:
            return self._take.receive_nowait()
        except trio.WouldBlock:
            return await self._take.receive()

    def release(self, slot: Slot) -> None:
        """Give a slot back, to the caller that has waited longest if there is one."""
        self._give.send_nowait(slot)
