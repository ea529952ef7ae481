"""A compiled model with what is known of it, and the requests that are made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import openvino as ov

from ovmstrio.core.tensor import TensorSpec
from ovmstrio.openvino.buckets import ShapeBuckets
from ovmstrio.openvino.first_runs import Timing, for_threads
from ovmstrio.openvino.signature import ModelSignature
from ovmstrio.openvino.slot import Blocking, Slot
from ovmstrio.work.cores import CORES
from ovmstrio.work.demand import Demand
from ovmstrio.work.placement import Placement

__all__ = ["Compiled"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled model with what is known of it.

    ``may_fail`` tells that shapes inside are found out at run time only, so that a valid request may fail, which
    spoils a stream for others until it is mended (``docs/openvino_defects.md``).  ``compile_again`` makes another
    one, of one stream if the model may fail; ``compile_timed`` one that tells the times of its layers; ``isolated``
    as many of one stream as this has. Requests of the pool are ``nireq``, of which ``side_by_side`` run at once.
    ``blocking`` is how the event loop infers, ``variables`` what a stateful model remembers, empty for others.
    ``weight_bytes`` are those of the constants that the file has.  ``buckets`` are what inputs are to be padded up
    to.  ``is_pinned`` tells whether its threads are bound to cores, None where that is not for the server to choose;
    ``chosen_anew`` makes one like it for so many calls at once that is bound or not as :data:`CORES` says by then, and
    has run; for 0 of them, one of one thread, where the model ``is_for_loop``.  ``may_share_out`` tells whether the
    server may choose how many inferences share the cores.  ``loop`` is the same of one thread, on which the event loop
    infers if this is not.
    """

    model: ov.CompiledModel
    compile_again: Callable[[], ov.CompiledModel]
    compile_timed: Callable[[], ov.CompiledModel]
    chosen_anew: Callable[[int], Compiled]
    isolated: Callable[[], tuple[ov.CompiledModel, ...]]
    signature: ModelSignature
    placement: Placement
    timing: Timing | None
    nireq: int
    side_by_side: int
    streams: int
    may_fail: bool
    blocking: Blocking
    variables: tuple[TensorSpec, ...] = ()
    weight_bytes: int = 0
    is_pinned: bool | None = None
    may_share_out: bool = False
    is_for_loop: bool = False
    loop: Compiled | None = None
    buckets: ShapeBuckets | None = None

    def with_loop(self, loop: Compiled) -> Compiled:
        """Give the same with a model of one thread beside it, on which the event loop infers what is short."""
        return replace(self, placement=loop.placement, loop=loop)

    def make_slot(self) -> Slot:
        """Make an infer request that any thread may use."""
        # Which can be one of any number of threads later.
        is_queued = self.is_for_loop and self.may_fail
        return Slot(self.model, self.signature, Blocking.QUEUED if is_queued else for_threads(self.blocking))

    def make_inline_slot(self) -> Slot:
        """Make the one infer request that the event loop runs itself."""
        of = self.loop or self
        return Slot(of.model, of.signature, of.blocking)

    def make_demand(self) -> Demand | None:
        """Make what watches its calls, where the server may choose for how many at once it is compiled."""
        if not (self.may_share_out or self.is_for_loop):
            return None
        most = CORES.count if self.may_share_out else 1
        return Demand(most, cores=CORES.count, is_for_loop=self.is_for_loop)

    def make_isolated_slots(self) -> list[Slot]:
        """Make as many infer requests as may run at once, none of which another one's failure can hurt."""
        if not self.may_fail:
            return [self.make_slot() for _ in range(self.nireq)]
        models = self.isolated() if self.streams > 1 else (self.model,)
        return [Slot(model, self.signature, Blocking.QUEUED) for model in models]
