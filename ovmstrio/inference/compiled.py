"""A compiled model with what is known of it, and the requests that are made of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import openvino as ov
import structlog

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.inference.infer_requests import Blocking, Slot
from ovmstrio.inference.runtime import OPENVINO_ERRORS
from ovmstrio.inference.shape_buckets import ShapeBuckets
from ovmstrio.inference.signature import ModelSignature
from ovmstrio.inference.tensors import placeholder
from ovmstrio.inference.tuner import Demand
from ovmstrio.util.cores import CORES
from ovmstrio.util.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BOUND", "Compiled", "Timing", "device_facts", "for_threads", "warm_up"]

# ----------------------------------------------------------------------
# What a device says of a model that it has compiled, for those who look
# ----------------------------------------------------------------------

BOUND: Final = "bound to cores"

_ASKED: Final = {
    "EXECUTION_DEVICES": "devices",
    "INFERENCE_PRECISION_HINT": "precision",
    "PERFORMANCE_HINT": "performance hint",
    "INFERENCE_NUM_THREADS": "threads",
    "ENABLE_CPU_PINNING": BOUND,
}


def device_facts(model: ov.CompiledModel) -> Mapping[str, Any]:
    """Give devices, precision, hint and threads, as far as the device tells; takes some microseconds."""
    facts = {}
    for asked, name in _ASKED.items():
        try:
            found: Any = model.get_property(asked)
        except (*OPENVINO_ERRORS, AttributeError):
            continue
        facts[name] = ", ".join(map(str, found)) if isinstance(found, list) else _plain(found)
    return facts


def _plain(value: Any) -> str | int:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = value if isinstance(value, int) else str(value)
    # Types and enumerations print as "<Type: 'float32'>" and "PerformanceMode.LATENCY".
    return text if isinstance(text, int) else text.removeprefix("<Type: '").removesuffix("'>").rpartition(".")[2]


# ----------------------------------------------------------------------
# The first inferences of a compiled model: whether it runs on ones, and how long that takes
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_TIMED_RUNS: Final = 15
_LONG_ENOUGH_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Timing:
    """What inferences took on so many bytes of input: the usual one, and the shortest."""

    median_seconds: float
    least_seconds: float
    input_bytes: int


def for_threads(blocking: Blocking) -> Blocking:
    """Give the way to infer on threads that come and go, where that of the event loop is for one thread only."""
    return Blocking.QUEUED if blocking is Blocking.MARKED else blocking


def warm_up(
    model: ov.CompiledModel,
    signature: ModelSignature,
    blocking: Blocking,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing | None:
    """Time inferences on ones, dynamic dimensions being 1.

    Gives None if the model cannot run on such inputs; it is then not fit for use any more.  The first run is not
    counted, as it allocates, and tells failures; a model for which one run is long is run twice only.
    """
    arrays = [placeholder(spec) for spec in signature.inputs]
    times: list[float] = []
    slot = Slot(model, signature, for_threads(blocking))
    try:
        slot.bind(arrays)
        slot.infer()
        if blocking is not for_threads(blocking):
            slot = Slot(model, signature, blocking)
            slot.bind(arrays)
            slot.infer()
        while len(times) < _TIMED_RUNS and sum(times) < _LONG_ENOUGH_SECONDS:
            begin = clock()
            slot.infer()
            times.append(clock() - begin)
    except ModelFailure as error:
        slot.keep_if_stuck()
        log.info("warm-up skipped: the model does not run on ones", reason=error.message)
        return None
    return Timing(statistics.median(times), min(times), sum(array.nbytes for array in arrays))


# ----------------------------------------------------------------------
# A compiled model with what is known of it, and the requests that are made of it
# ----------------------------------------------------------------------


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
