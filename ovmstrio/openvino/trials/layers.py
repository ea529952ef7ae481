"""Run the first layers of a model alone, so that the one can be found that crashes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.openvino.runtime import OPENVINO_ERRORS, core

__all__ = ["layers_of", "run_part"]

_NO_LAYERS: Final = frozenset({"Parameter", "Constant", "Result"})
_ONE_THREAD: Final = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "1"}
_LONG: Final = 40
"""Strings of such a length have memory of their own, which two owners give back twice."""


def layers_of(model: ov.Model) -> list[str]:
    """Name the layers in the order in which they run; none for a model with state, which cannot be cut."""
    return [] if model.get_sinks() else [f"{node.friendly_name} ({node.get_type_name()})" for node in _layers(model)]


def _layers(model: ov.Model) -> list[ov.Node]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() not in _NO_LAYERS]


def run_part(model: ov.Model, count: int, value: int, device: str) -> None:
    """Run the first ``count`` layers on inputs that are all ``value``, open dimensions being 1.

    What OpenVINO refuses is no crash.
    """
    kept = _layers(model)[:count]
    names = {node.friendly_name for node in kept}
    ends = [op.result(port) for node in kept for port in node.outputs() if not _is_used_up(port, names)]
    with suppress(*OPENVINO_ERRORS):
        part = ov.Model(ends, model.get_parameters(), "part")
        compiled = core().compile_model(part, device, _ONE_THREAD)
        request = compiled.create_infer_request()
        for index, port in enumerate(compiled.inputs):
            request.set_input_tensor(index, _filled(port, value))
        for _ in range(2):
            request.infer(share_inputs=True)


def _is_used_up(port: Any, names: set[str]) -> bool:
    """Tell whether only layers that are kept take an output."""
    takers = [taker.get_node().friendly_name for taker in port.get_target_inputs()]
    return bool(takers) and all(taker in names for taker in takers)


def _filled(port: Any, value: int) -> ov.Tensor:
    shape = [max(1, size.get_min_length()) if size.is_dynamic else size.get_length() for size in port.partial_shape]
    tensor = ov.Tensor(port.element_type, ov.Shape(shape))
    if port.element_type == ov.Type.string:
        tensor.bytes_data = np.full(shape, _LONG * str(value).encode() if value else b"")
    else:
        tensor.data[...] = value
    return tensor
