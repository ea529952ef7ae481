"""Preparation of the sample vad_stateful: stores the state and the end of the previous chunk in model variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op
from openvino.passes import MakeStateful, Manager

from ovmstrio.conversion import save

__all__ = ["CHUNK", "ENTRIES", "remember"]

CHUNK: Final = 512
_CONTEXT: Final = 64


def _parameter(name: str, size: int) -> Any:
    node = op.parameter([1, size], np.float32, name=name)
    node.output(0).set_names({name})
    return node


def _take_chunks(model: ov.Model) -> None:
    """Split ``input`` into ``context``, the end of the previous chunk, and ``audio``, the new chunk."""
    window = next(node for node in model.get_parameters() if "input" in node.output(0).get_names())
    audio, context = _parameter("audio", CHUNK), _parameter("context", _CONTEXT)
    joined = op.concat([context, audio], 1)
    for consumer in window.output(0).get_target_inputs():
        consumer.replace_source_output(joined.output(0))
    model.remove_parameter(window)
    places = (np.array([place], np.int64) for place in (CHUNK - _CONTEXT, CHUNK, 1, 1))
    end = op.slice(audio, *places)
    end.output(0).set_names({"contextN"})
    model.add_parameters([audio, context])
    model.add_results([op.result(end)])
    model.validate_nodes_and_infer_types()


def remember(model: ov.Model) -> None:
    """Convert ``input``, ``state`` -> ``output``, ``stateN`` to ``audio`` -> ``output`` with two variables."""
    # The probability tensor also has an internal name, which a server might show instead of "output".
    model.output("output").set_names({"output"})
    _take_chunks(model)
    manager = Manager()
    manager.register_pass(MakeStateful({"state": "stateN", "context": "contextN"}))
    manager.run_passes(model)


def write(files: Path, directory: Path) -> None:
    """Write the version directory."""
    model = ov.Core().read_model(files / "silero_vad_openvino_16k.onnx")
    remember(model)
    save(model, directory)


ENTRIES = {"vad_stateful": write}
