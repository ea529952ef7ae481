"""Run inferences of one compiled model from any thread, outside of the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.tensor import Array
from ovmstrio.openvino.compiled import Compiled
from ovmstrio.openvino.mending import replace_model
from ovmstrio.openvino.slot import Slot

__all__ = ["BlockingNetwork"]


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
