"""Run a freshly compiled model on zeros: it allocates what it needs, and its time tells where it should run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Final

import openvino as ov
import structlog

from ovmstrio.core.errors import ModelFailure
from ovmstrio.openvino.pool import Slot
from ovmstrio.openvino.signature import Signature
from ovmstrio.openvino.tensors import placeholder

__all__ = ["Timing", "warm_up"]

log = structlog.get_logger(__name__)

_TIMED_RUNS: Final = 15
_LONG_ENOUGH_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Timing:
    """What one inference took on so many bytes of input."""

    median_seconds: float
    input_bytes: int


def warm_up(model: ov.CompiledModel, signature: Signature, *, synchronous: bool) -> Timing | None:
    """Time inferences on zeros, dynamic dimensions being 1.

    Gives None if the model cannot run on such inputs; it is then not fit for use any more.  The first run is not
    counted, as it allocates; a model for which one run is long is run twice only.  ``synchronous`` is as in
    :class:`~ovmstrio.openvino.pool.Slot`.
    """
    arrays = [placeholder(spec) for spec in signature.inputs]
    slot = Slot(model, signature, synchronous=synchronous)
    times: list[float] = []
    try:
        slot.bind(arrays)
        slot.infer()
        while len(times) < _TIMED_RUNS and sum(times) < _LONG_ENOUGH_SECONDS:
            begin = time.perf_counter()
            slot.infer()
            times.append(time.perf_counter() - begin)
    except ModelFailure as error:
        log.info("warm-up skipped: the model does not run on zeros", reason=error.message)
        return None
    return Timing(statistics.median(times), sum(array.nbytes for array in arrays))
