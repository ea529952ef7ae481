"""Execution time per layer, measured on a profiled copy of the model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.service import LayerTime, LayerTimes
from ovmstrio.inference.infer_requests import InferMode, Slot
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.tensors import placeholder

if TYPE_CHECKING:
    from collections.abc import Callable

    import openvino as ov

    from ovmstrio.inference.signature import ModelSignature

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
