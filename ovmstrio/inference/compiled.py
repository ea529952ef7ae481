"""Compiled model: OpenVINO's model with its signature, timing, placement and factories for infer requests.

A new model is timed and runs on its shape buckets; the time of each layer is measured on request.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import openvino as ov
import structlog

from ovmstrio.config.documents import member_path
from ovmstrio.config.shapes import SHAPE_BUCKETS
from ovmstrio.core.errors import ModelFailure, Problem
from ovmstrio.core.hooks import ServableHooks
from ovmstrio.core.service import LayerTime, LayerTimes
from ovmstrio.core.tensor import Array, TensorSpec, from_bf16
from ovmstrio.inference.infer_requests import InferMode, Slot
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.shape_buckets import BucketDimension, PaddedInputs, ShapeBuckets
from ovmstrio.inference.signature import ModelSignature
from ovmstrio.inference.tensors import placeholder
from ovmstrio.inference.tuner import ModelTuner, Placement
from ovmstrio.util.cores import CORES

if TYPE_CHECKING:
    from collections.abc import Mapping

log = structlog.get_logger(__name__)

# ----------------------------------------------------------------------
# Properties
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Timing
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Compiled model
# ----------------------------------------------------------------------


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
    nireq: int  # number of requests in the pool, of which ``concurrency`` run at once
    concurrency: int
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


# ----------------------------------------------------------------------
# Time of each layer, on a profiled copy
# ----------------------------------------------------------------------

PROFILING_CONFIG: Final = {"PERF_COUNT": "YES"}
_MAX_RUNS: Final = 200
_NOT_COMPUTED: Final = ("unknown", "undef")  # implementation names of layers that compute nothing


def time_layers(
    compile_profiled: Callable[[], ov.CompiledModel], signature: ModelSignature, seconds: float
) -> LayerTimes:
    """Compile a model with ``PROFILING_CONFIG`` and time its layers on ones, with dynamic dimensions 1. Blocks.

    Raises:
        ConfigError: the model cannot be compiled with profiling.
        ModelFailure: the model does not run on ones, or the device reports no times.
    """
    slot = Slot(compile_profiled(), signature, InferMode.QUEUED)
    slot.bind([placeholder(spec) for spec in signature.inputs])
    try:
        slot.infer()
        sums: dict[tuple[str, str, str], float] = {}
        runs, begun = 0, time.perf_counter()
        while runs < _MAX_RUNS and (not runs or time.perf_counter() - begun < seconds):
            slot.infer()
            runs += 1
            _add_times(slot, sums)
        taken = time.perf_counter() - begun
    finally:
        slot.unbind()
    layers = tuple(LayerTime(*layer, total / runs) for layer, total in sums.items())
    return LayerTimes(runs, taken / runs, layers)


def _add_times(slot: Slot, sums: dict[tuple[str, str, str], float]) -> None:
    try:
        profile = slot.request.get_profiling_info()
    except OPENVINO_ERRORS as error:
        raise ModelFailure(f"the device reports no layer times: {openvino_error_message(error)}") from error
    for each in profile:
        # A layer faster than the clock's resolution is reported as not executed.
        if each.status.name == "EXECUTED" or not each.exec_type.startswith(_NOT_COMPUTED):
            layer = each.node_name, each.node_type, each.exec_type
            sums[layer] = sums.get(layer, 0.0) + each.real_time.total_seconds()


# ----------------------------------------------------------------------
# Warm-up on shape buckets, and a check that padding does not change outputs
# ----------------------------------------------------------------------

_MAX_SHAPES: Final = 64
_MAX_SECONDS: Final = 20.0
_TOLERANCE: Final = 0.02  # above the difference that another summation order makes in bf16


def warm_buckets(compiled: Compiled) -> tuple[Compiled, list[Problem]]:
    """Run a model on padded ones for each bucket and stream, up to 64 shapes or 20 seconds. Blocks.

    A model that does not run on ones is skipped.

    Returns:
        The model, recompiled if a run failed, and warnings about failures and about outputs that padding changes.
    """
    buckets = compiled.buckets
    if buckets is None or compiled.timing is None:
        return compiled, []
    slots = [compiled.create_slot() for _ in range(max(1, compiled.concurrency))]
    ones = _ones(compiled.signature.inputs, buckets)
    try:
        problems = [
            each for dimension in buckets.dimensions for each in _padding_effects(compiled, slots[0], dimension, ones)
        ]
        _run_all(buckets, slots, ones)
    except ModelFailure as error:
        for slot in slots:
            slot.retain_if_stuck()
        message = f"warm-up failed on inputs padded to buckets: {error.message}"
        warning = Problem(message, path=SHAPE_BUCKETS, severity="warning")
        return replace(compiled, model=compiled.compile_replacement()), [warning]
    return compiled, problems


def _ones(inputs: Sequence[TensorSpec], buckets: ShapeBuckets) -> list[Array]:
    ones = [placeholder(spec) for spec in inputs]
    for dimension in buckets.dimensions:
        size = max(ones[place.tensor].shape[place.axis] for place in dimension.inputs)
        for tensor, axis, _ in dimension.inputs:
            shape = list(ones[tensor].shape)
            shape[axis] = size
            ones[tensor] = np.resize(ones[tensor], shape)
    return ones


def _run_all(buckets: ShapeBuckets, slots: Sequence[Slot], ones: Sequence[Array]) -> None:
    begin = monotonic()
    every = buckets.all_sizes()
    for done, sizes in enumerate(every):
        if done >= _MAX_SHAPES or monotonic() - begin > _MAX_SECONDS:
            log.info("bucket warm-up incomplete", shapes=len(every) - done, warmed_up=done)
            return
        _run_on_each(slots, buckets.shaped(ones, sizes).filled())


def _run_on_each(slots: Sequence[Slot], arrays: Sequence[Array]) -> None:
    try:
        for slot in slots:
            slot.bind(arrays)
            slot.request.start_async()
        for slot in slots:
            slot.request.wait()
    except OPENVINO_ERRORS as error:
        for slot in slots:
            with suppress(*OPENVINO_ERRORS):
                slot.request.cancel()
                slot.request.wait()
        raise ModelFailure(openvino_error_message(error)) from error
    for slot in slots:
        slot.unbind()


def _padding_effects(
    compiled: Compiled, slot: Slot, dimension: BucketDimension, ones: Sequence[Array]
) -> list[Problem]:
    """Return a warning for each output that changes when the input is padded along one dimension."""
    place = dimension.inputs[0]
    given = ones[place.tensor].shape[place.axis]
    size = next((size for size in dimension.sizes if size > given), 0)
    if not size:
        return []
    buckets = ShapeBuckets([dimension], compiled.signature.inputs)
    exact = _outputs(slot, PaddedInputs(ones, {}))
    padded = _outputs(slot, buckets.shaped(ones, [size]))
    return [
        Problem(
            f"output {spec.name!r} changes when inputs are padded (tested with ones from {given} to {size})",
            path=member_path(SHAPE_BUCKETS, dimension.name),
            suggestion='set "pad" to a value that the model ignores, or leave this dimension out',
            severity="warning",
        )
        for spec, first, second in zip(compiled.signature.outputs, exact, padded, strict=True)
        if not _are_alike(first, second, spec)
    ]


def _outputs(slot: Slot, fitted: PaddedInputs) -> list[Array]:
    slot.bind(fitted.filled())
    try:
        slot.infer()
        return slot.outputs(output_slices=fitted.output_slices)
    finally:
        slot.unbind()


def _are_alike(first: Array, second: Array, spec: TensorSpec) -> bool:
    if first.shape != second.shape:
        return False
    if first.dtype.hasobject or (first.dtype.kind != "f" and spec.datatype.name != "BF16"):
        return bool((first == second).all())
    one, other = (from_bf16(each) if spec.datatype.name == "BF16" else each for each in (first, second))
    scale = float(np.max(np.abs(one), initial=0, where=np.isfinite(one)))
    return bool(np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True))
