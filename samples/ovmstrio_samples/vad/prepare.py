"""Serve the model with its state as an input and an output, under plain names."""

from __future__ import annotations

from pathlib import Path

import openvino as ov

from ovmstrio.conversion import save

__all__ = ["ENTRIES"]


def write(files: Path, directory: Path) -> None:
    """Write the version directory: ``input`` and ``state`` become ``output`` and ``stateN``."""
    model = ov.Core().read_model(files / "silero_vad_openvino_16k.onnx")
    # The probability's tensor carries an inner name of the graph, too, under which a server might show it.
    model.output("output").set_names({"output"})
    save(model, directory)


ENTRIES = {"vad": write}
