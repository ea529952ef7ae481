"""Run a model on its buckets before anybody calls it: the first call is as fast as others, and what is odd is told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Final

import numpy as np
import structlog

from ovmstrio.config.shapes import OPTION
from ovmstrio.core.errors import ModelFailure, Problem
from ovmstrio.core.tensor import Array, TensorSpec, from_bf16
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.infer_requests import Slot
from ovmstrio.inference.runtime import OPENVINO_ERRORS, reason
from ovmstrio.inference.shape_buckets import Dimension, Fitted, ShapeBuckets
from ovmstrio.inference.tensors import placeholder

__all__ = ["warm_buckets"]

log = structlog.get_logger(__name__)

_MOST_SHAPES: Final = 64
_MOST_SECONDS: Final = 20.0
_TOLERANCE: Final = 0.02
"""What bf16 makes of the same numbers in sums of another order stays below it."""


def warm_buckets(compiled: Compiled) -> tuple[Compiled, list[Problem]]:
    """Run a model on ones that are padded up to its buckets, on each of its streams.  Blocks for as long as that takes.

    After 64 shapes or 20 seconds the rest is left to requests.  A model that does not run on ones is left alone.

    Returns:
        The model, compiled again if a run failed, and warnings: of what failed, and of outputs that are others when
        inputs are padded.
    """
    buckets = compiled.buckets
    if buckets is None or compiled.timing is None:
        return compiled, []
    slots = [compiled.make_slot() for _ in range(max(1, compiled.side_by_side))]
    ones = _ones(compiled.signature.inputs, buckets)
    try:
        problems = [each for dimension in buckets.dimensions for each in _changes(compiled, slots[0], dimension, ones)]
        _run_all(buckets, slots, ones)
    except ModelFailure as error:
        for slot in slots:
            slot.keep_if_stuck()
        message = f"the model fails on ones that are padded to buckets: {error.message}"
        warning = Problem(message, path=OPTION, severity="warning")
        return replace(compiled, model=compiled.compile_again()), [warning]
    return compiled, problems


def _ones(inputs: Sequence[TensorSpec], buckets: ShapeBuckets) -> list[Array]:
    """Make inputs as small as can be, of one size in each dimension that has buckets."""
    ones = [placeholder(spec) for spec in inputs]
    for dimension in buckets.dimensions:
        size = max(ones[place.tensor].shape[place.axis] for place in dimension.inputs)
        for tensor, axis, _ in dimension.inputs:
            shape = list(ones[tensor].shape)
            shape[axis] = size
            ones[tensor] = np.resize(ones[tensor], shape)
    return ones


def _run_all(buckets: ShapeBuckets, slots: Sequence[Slot], ones: Sequence[Array]) -> None:
    """Run on all sizes, as far as there is time.

    Raises:
        ModelFailure: a run fails.
    """
    begin = monotonic()
    every = buckets.all_sizes()
    for done, sizes in enumerate(every):
        if done >= _MOST_SHAPES or monotonic() - begin > _MOST_SECONDS:
            log.info("buckets left to requests", shapes=len(every) - done, warmed_up=done)
            return
        _run_on_each(slots, buckets.shaped(ones, sizes).filled())


def _run_on_each(slots: Sequence[Slot], arrays: Sequence[Array]) -> None:
    """Run at once on as many streams as there are."""
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
        raise ModelFailure(reason(error)) from error
    for slot in slots:
        slot.unbind()


def _changes(compiled: Compiled, slot: Slot, dimension: Dimension, ones: Sequence[Array]) -> list[Problem]:
    """Tell which outputs are others for the same input when that is padded along one dimension.

    Raises:
        ModelFailure: a run fails.
    """
    place = dimension.inputs[0]
    given = ones[place.tensor].shape[place.axis]
    size = next((size for size in dimension.sizes if size > given), 0)
    if not size:
        return []
    alone = ShapeBuckets([dimension], compiled.signature.inputs)
    exact = _outputs(slot, Fitted(ones, {}))
    padded = _outputs(slot, alone.shaped(ones, [size]))
    return [
        Problem(
            f"the output {spec.name!r} is another one where inputs are padded, as ones from {given} to {size} show",
            path=f"{OPTION}.{dimension.name}",
            suggestion='set "pad" to what the model takes for nothing, or leave this dimension out',
            severity="warning",
        )
        for spec, first, second in zip(compiled.signature.outputs, exact, padded, strict=True)
        if not _are_alike(first, second, spec)
    ]


def _outputs(slot: Slot, fitted: Fitted) -> list[Array]:
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
