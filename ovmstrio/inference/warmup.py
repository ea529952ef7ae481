"""Warm-up of a model on its shape buckets, with a check that padding does not change its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Final

import numpy as np
import structlog

from ovmstrio.config.shapes import SHAPE_BUCKETS
from ovmstrio.core.errors import ModelFailure, Problem
from ovmstrio.core.tensor import Array, TensorSpec, from_bf16
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.infer_requests import Slot
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.shape_buckets import BucketDimension, PaddedInputs, ShapeBuckets
from ovmstrio.inference.tensors import placeholder

log = structlog.get_logger(__name__)

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
    slots = [compiled.create_slot() for _ in range(max(1, compiled.side_by_side))]
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
            path=f"{SHAPE_BUCKETS}.{dimension.name}",
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
        return slot.outputs(cuts=fitted.cuts)
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
