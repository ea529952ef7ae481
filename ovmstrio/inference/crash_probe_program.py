"""Program of a crash-probe worker: each request names an operation on a model."""

from __future__ import annotations

import gc
import importlib
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.config.tensor_mapping import TensorMapping
from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.core.tensor import BYTES
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.runtime import OPENVINO_ERRORS, core
from ovmstrio.inference.tensors import placeholder
from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests, exit_now, run_program
from ovmstrio.telemetry.logs import configure_logs

_NON_LAYER_TYPES: Final = frozenset({"Parameter", "Constant", "Result"})
_ONE_THREAD: Final = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "1"}
_LONG_STRING_BYTES: Final = 40  # strings of this length are allocated on the heap, where a double free shows


def layer_names(model: ov.Model) -> list[str]:
    """Return the layer names in execution order; empty for a stateful model, which cannot be cut."""
    return [] if model.get_sinks() else [f"{node.friendly_name} ({node.get_type_name()})" for node in _layers(model)]


def _layers(model: ov.Model) -> list[ov.Node]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() not in _NON_LAYER_TYPES]


def run_part(model: ov.Model, count: int, value: int, device: str) -> None:
    """Run the first ``count`` layers on inputs filled with ``value``, with dynamic dimensions 1; errors are ignored."""
    kept = _layers(model)[:count]
    names = {node.friendly_name for node in kept}
    ends = [op.result(port) for node in kept for port in node.outputs() if not _is_internal(port, names)]
    with suppress(*OPENVINO_ERRORS):
        part = ov.Model(ends, model.get_parameters(), "part")
        compiled = core().compile_model(part, device, _ONE_THREAD)
        request = compiled.create_infer_request()
        for index, port in enumerate(compiled.inputs):
            request.set_input_tensor(index, _filled(port, value))
        for _ in range(2):
            request.infer(share_inputs=True)


def _is_internal(port: Any, names: set[str]) -> bool:
    """Return whether only selected layers consume an output."""
    takers = [taker.get_node().friendly_name for taker in port.get_target_inputs()]
    return bool(takers) and all(taker in names for taker in takers)


def _filled(port: Any, value: int) -> ov.Tensor:
    shape = [max(1, size.get_min_length()) if size.is_dynamic else size.get_length() for size in port.partial_shape]
    tensor = ov.Tensor(port.element_type, ov.Shape(shape))
    if port.element_type == ov.Type.string:
        tensor.bytes_data = np.full(shape, _LONG_STRING_BYTES * str(value).encode() if value else b"")
    else:
        tensor.data[...] = value
    return tensor


_RUNS: Final = 2
_SLOW_SECONDS: Final = 0.05  # a longer run is not repeated: the warm-up has run the model twice
_NICENESS: Final = 5  # niceness, as requests take precedence


class _ProbedModel:
    def __init__(self) -> None:
        self._compiled: Compiled | None = None

    def load(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Compile a model and run it on ones, like a server; return problems."""
        try:
            compiled = self._compiled = _function(request["compile"])(request["argument"])
        except ConfigError as error:
            return [asdict(problem) for problem in error.problems]
        except Exception as error:  # noqa: BLE001 - reported as the model's error
            text = f"OpenVINO cannot compile the model: {type(error).__name__}: {error}"
            return [asdict(Problem(text, file=request["source"]))]
        specs = compiled.signature.inputs
        _run(compiled, [placeholder(spec) for spec in specs])
        if any(spec.datatype is BYTES for spec in specs):
            # Short strings are stored inline, long ones on the heap.
            long = np.array(_LONG_STRING_BYTES * b"1", dtype=object)
            ones = [placeholder(spec) for spec in specs]
            _run(compiled, [np.full(one.shape, long) if one.dtype.hasobject else one for one in ones])
        if compiled.may_fail:
            # A server verifies a model this way after a failed request.
            _run(compiled, [placeholder(spec, 1) for spec in specs])
        return []

    def zeros(self, _: Mapping[str, Any]) -> None:
        if self._compiled is not None:
            _run(self._compiled, [placeholder(spec, value=0) for spec in self._compiled.signature.inputs])

    def forget(self, _: Mapping[str, Any]) -> None:
        """Free the model, which reveals heap corruption."""
        self._compiled = None
        gc.collect()

    def layers(self, request: Mapping[str, Any]) -> list[str]:
        return layer_names(_function(request["read"])(Path(request["source"])))

    def part(self, request: Mapping[str, Any]) -> None:
        model = _function(request["read"])(Path(request["source"]))
        run_part(model, request["count"], request["value"], request["device"])


def compile_from_plain_data(argument: Mapping[str, Any]) -> Compiled:
    """Compile a model described by plain data, like :func:`~ovmstrio.inference.compile.compile_model`."""
    spec = ModelSpec.model_validate_json(argument["spec"])
    kept = None if argument["kept"] is None else Path(argument["kept"])
    return compile_model(ModelFile(Path(argument["file"]), spec, TensorMapping(**argument["mapping"]), kept=kept))


def _run(compiled: Compiled, inputs: Sequence[Any]) -> None:
    """Run a model twice, or once if it is slow, on a new request; errors are ignored."""
    slot, begin = compiled.create_slot(), monotonic()
    with suppress(ModelFailure):
        for _ in range(_RUNS):
            slot.bind(inputs)
            slot.infer()
            slot.outputs()
            slot.unbind()
            if monotonic() - begin > _SLOW_SECONDS:
                break
    slot.unbind()


def _function(name: str) -> Callable[[Any], Any]:
    module, _, function = name.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    return found


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    await first.answer(None)
    await requests.handle_all(partial(_answer, _ProbedModel()))


async def _answer(subject: _ProbedModel, request: WorkRequest) -> None:
    operation: Callable[[Any], Any] = getattr(subject, request.value["operation"])
    await request.answer(await trio.to_thread.run_sync(operation, request.value, abandon_on_cancel=True))


def main() -> None:
    """Serve on the socket whose descriptor is ``argv[1]``."""
    # Each model ends with a collection, which need not visit what was imported.
    gc.freeze()
    configure_logs(level="ERROR")
    os.nice(_NICENESS)
    # Crashes are expected here, so write no core dumps.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    run_program(_serve)
    exit_now()


if __name__ == "__main__":
    main()
