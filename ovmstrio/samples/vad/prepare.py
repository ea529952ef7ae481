"""Preparation of the sample vad: writes the model with its state as an input and an output, with plain names."""

from __future__ import annotations

from pathlib import Path

import openvino as ov

from ovmstrio.conversion import save

__all__ = ["ENTRIES"]


def write(files: Path, directory: Path) -> None:
    """Write the version directory: ``input``, ``state`` -> ``output``, ``stateN``."""
    model = ov.Core().read_model(files / "silero_vad_openvino_16k.onnx")
    # The probability tensor also has an internal name, which a server might show instead of "output".
    model.output("output").set_names({"output"})
    save(model, directory)


ENTRIES = {"vad": write}
