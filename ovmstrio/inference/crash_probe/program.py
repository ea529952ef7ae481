"""The program of a worker process that tries models: each request names a deed, and what with."""

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
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op
import trio

from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.core.tensor import BYTES, Array, TensorSpec
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.runtime import OPENVINO_ERRORS, core
from ovmstrio.inference.tensors import placeholder
from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests, leave, run_program
from ovmstrio.telemetry.logs import configure_logs

__all__ = ["layers_of", "main", "run_part"]

# ----------------------------------------------------------------------
# Run the first layers of a model alone, so that the one can be found that crashes
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# The program of a worker process that tries models: each request names a deed, and what with
# ----------------------------------------------------------------------

_RUNS: Final = 2
_POLITENESS: Final = 5
"""Calls of a server that is serving go before a trial."""


class _Subject:
    """The model that was tried last."""

    def __init__(self) -> None:
        self._compiled: Compiled | None = None

    def load(self, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Compile a model and run it on ones, as a server does; gives what is wrong with it."""
        try:
            compiled = self._compiled = _function(question["compile"])(question["argument"])
        except ConfigError as error:
            return [asdict(problem) for problem in error.problems]
        except Exception as error:  # noqa: BLE001 - what OpenVINO raises becomes the model's state
            text = f"OpenVINO cannot compile the model: {type(error).__name__}: {error}"
            return [asdict(Problem(text, file=question["source"]))]
        specs = compiled.signature.inputs
        _run(compiled, [placeholder(spec) for spec in specs])
        if any(spec.datatype is BYTES for spec in specs):
            # Short strings and long ones have their memory in different places.
            _run(compiled, [_longer(placeholder(spec), spec) for spec in specs])
        if compiled.may_fail:
            # So does a server mend a model after a request that failed.
            _run(compiled, [placeholder(spec, 1) for spec in specs])
        return []

    def zeros(self, _: Mapping[str, Any]) -> None:
        """Run the model on zeros."""
        if self._compiled is not None:
            _run(self._compiled, [placeholder(spec, value=0) for spec in self._compiled.signature.inputs])

    def forget(self, _: Mapping[str, Any]) -> None:
        """Give back all memory, which is where it shows if it was spoiled."""
        self._compiled = None
        gc.collect()

    def layers(self, question: Mapping[str, Any]) -> list[str]:
        """Tell what the layers are called, in the order in which they run."""
        return layers_of(_function(question["read"])(Path(question["source"])))

    def part(self, question: Mapping[str, Any]) -> None:
        """Run the first ``count`` layers of a model on inputs of one value."""
        model = _function(question["read"])(Path(question["source"]))
        run_part(model, question["count"], question["value"], question["device"])


def _longer(array: Array, spec: TensorSpec) -> Array:
    return np.full(array.shape, _LONG * b"1", dtype=object) if spec.datatype is BYTES else array


def _run(compiled: Compiled, inputs: Sequence[Any]) -> None:
    """Run a model a few times, and let its request go; what it refuses is no crash."""
    slot = compiled.make_slot()
    with suppress(ModelFailure):
        for _ in range(_RUNS):
            slot.bind(inputs)
            slot.infer()
            slot.outputs()
            slot.unbind()
    slot.unbind()


def _function(name: str) -> Callable[[Any], Any]:
    """Find a function of the server's own."""
    module, _, function = name.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    return found


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    """Do what is asked, until the server has nothing more to ask.

    Cancellation: at once; what a thread does goes on until the process ends.
    """
    await first.answer(None)
    await requests.handle_all(partial(_answer, _Subject()))


async def _answer(subject: _Subject, request: WorkRequest) -> None:
    """Do what is asked, and send what comes of it.

    Cancellation: at once; nobody is there to be answered then.
    """
    deed: Callable[[Any], Any] = getattr(subject, request.value["deed"])
    await request.answer(await trio.to_thread.run_sync(deed, request.value, abandon_on_cancel=True))


def main() -> None:
    """Serve the server whose socket's descriptor is the first argument."""
    configure_logs(level="ERROR")
    os.nice(_POLITENESS)
    # A crash is what this is for, and no reason to fill the disk with its memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    run_program(_serve)
    leave()


if __name__ == "__main__":
    main()
