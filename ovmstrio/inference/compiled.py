"""Compiled model: OpenVINO's model with its signature, timing, placement and factories for infer requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import openvino as ov
import structlog

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.hooks import ServableHooks
from ovmstrio.core.tensor import TensorSpec
from ovmstrio.inference.infer_requests import InferMode, Slot
from ovmstrio.inference.runtime import OPENVINO_ERRORS
from ovmstrio.inference.shape_buckets import ShapeBuckets
from ovmstrio.inference.signature import ModelSignature
from ovmstrio.inference.tensors import placeholder
from ovmstrio.inference.tuner import ModelTuner, Placement
from ovmstrio.util.cores import CORES

if TYPE_CHECKING:
    from collections.abc import Mapping

CPU_PINNED: Final = "bound to cores"

_PROPERTIES: Final = {
    "EXECUTION_DEVICES": "devices",
    "INFERENCE_PRECISION_HINT": "precision",
    "PERFORMANCE_HINT": "performance hint",
    "INFERENCE_NUM_THREADS": "threads",
    "ENABLE_CPU_PINNING": CPU_PINNED,
}


def device_properties(model: ov.CompiledModel) -> Mapping[str, Any]:
    """Return devices, precision, hint, threads and pinning as far as the device reports them (some microseconds)."""
    facts = {}
    for asked, name in _PROPERTIES.items():
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


log = structlog.get_logger(__name__)

_TIMED_RUNS: Final = 15
_LONG_ENOUGH_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and minimum inference time for inputs of ``input_bytes``."""

    median_seconds: float
    min_seconds: float
    input_bytes: int


def thread_safe_mode(blocking: InferMode) -> InferMode:
    """Return the execution mode for arbitrary threads, as ``MARKED`` is for a single thread."""
    return InferMode.QUEUED if blocking is InferMode.MARKED else blocking


def warm_up(
    model: ov.CompiledModel,
    signature: ModelSignature,
    blocking: InferMode,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing | None:
    """Time inferences on ones, with dynamic dimensions 1; None if the model fails on them and must be discarded.

    The first run is not counted, because it allocates. A slow model runs twice only.
    """
    arrays = [placeholder(spec) for spec in signature.inputs]
    times: list[float] = []
    slot = Slot(model, signature, thread_safe_mode(blocking))
    try:
        slot.bind(arrays)
        slot.infer()
        if blocking is not thread_safe_mode(blocking):
            slot = Slot(model, signature, blocking)
            slot.bind(arrays)
            slot.infer()
        while len(times) < _TIMED_RUNS and sum(times) < _LONG_ENOUGH_SECONDS:
            begin = clock()
            slot.infer()
            times.append(clock() - begin)
    except ModelFailure as error:
        slot.retain_if_stuck()
        log.info("warm-up skipped: the model does not run on ones", reason=error.message)
        return None
    return Timing(statistics.median(times), min(times), sum(array.nbytes for array in arrays))


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled model with its properties.

    Attributes:
        recompile: compiles and runs a copy for a concurrency, pinned or not as :data:`CORES` says; 0 means one
            thread, for models that are ``is_for_loop``.
        isolated: compiles as many models of one stream as this one has streams.
        may_fail: whether shapes inside are known at run time only, so that a valid request may fail and taint its
            stream until recovery (``docs/openvino_defects.md``).
    """

    model: ov.CompiledModel
    compile_replacement: Callable[[], ov.CompiledModel]  # compiles a replacement, with one stream if the model may fail
    compile_profiled: Callable[[], ov.CompiledModel]  # compiles a copy that reports layer times
    recompile: Callable[[int], Compiled]
    isolated: Callable[[], tuple[ov.CompiledModel, ...]]
    signature: ModelSignature
    placement: Placement
    timing: Timing | None
    nireq: int  # number of requests in the pool, of which ``side_by_side`` run at once
    side_by_side: int
    streams: int
    may_fail: bool
    blocking: InferMode  # execution mode on the event loop
    variables: tuple[TensorSpec, ...] = ()  # state of a stateful model
    weight_bytes: int = 0  # size of the constants
    is_pinned: bool | None = None  # whether its threads are pinned to cores; None where the server must not choose
    can_choose_concurrency: bool = False  # whether the server may choose the concurrency
    is_for_loop: bool = False
    loop: Compiled | None = None  # copy of one thread for the event loop, if this model has several
    buckets: ShapeBuckets | None = None  # sizes that inputs are padded to

    def with_inline_model(self, loop: Compiled) -> Compiled:
        """Return a copy with a one-thread model on which the event loop runs short inferences."""
        return replace(self, placement=loop.placement, loop=loop)

    def create_slot(self) -> Slot:
        """Create an infer request that any thread may use."""
        # The slot may later be attached to a model of several threads.
        is_queued = self.is_for_loop and self.may_fail
        return Slot(self.model, self.signature, InferMode.QUEUED if is_queued else thread_safe_mode(self.blocking))

    def create_inline_slot(self) -> Slot:
        """Create the infer request that the event loop runs itself."""
        of = self.loop or self
        return Slot(of.model, of.signature, of.blocking)

    def create_tuner(self, hooks: ServableHooks) -> ModelTuner:
        """Create the tuner of this model and of those that it is recompiled to."""
        return ModelTuner(
            self.placement,
            hooks,
            max_concurrency=CORES.count if self.can_choose_concurrency else int(self.is_for_loop),
            cores=CORES.count,
            is_for_loop=self.is_for_loop,
            is_pinned=self.is_pinned,
            weight_bytes=self.weight_bytes,
        )

    def create_isolated_slots(self) -> list[Slot]:
        """Create as many infer requests as may run at once, none affected by another's failure."""
        if not self.may_fail:
            return [self.create_slot() for _ in range(self.nireq)]
        models = self.isolated() if self.streams > 1 else (self.model,)
        return [Slot(model, self.signature, InferMode.QUEUED) for model in models]
