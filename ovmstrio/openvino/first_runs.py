"""The first inferences of a compiled model: whether it runs on ones, and how long that takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import openvino as ov
import structlog

from ovmstrio.core.errors import ModelFailure
from ovmstrio.openvino.ov_tensors import placeholder
from ovmstrio.openvino.signature import ModelSignature
from ovmstrio.openvino.slot import Blocking, Slot

__all__ = ["Timing", "for_threads", "warm_up"]

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
