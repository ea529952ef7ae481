"""One call of a network: what it was given, and who is told what became of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ovmstrio.core.tracing import current_span

if TYPE_CHECKING:
    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.hooks import ServableHooks
    from ovmstrio.core.tensor import Array
    from ovmstrio.openvino.buckets import Cuts
    from ovmstrio.openvino.model_state import StateChange

__all__ = ["InferCall"]


class InferCall(NamedTuple):
    """What :meth:`ovmstrio.openvino.network.Network.infer` was given, and when."""

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
