"""Preparation of the sample text_generation: writes the graph and the language model as OpenVINO IR."""

from __future__ import annotations

from pathlib import Path

from ovmstrio.samples.copying import copy_graph
from ovmstrio.samples.gguf_files import SMOLLM2, convert_gguf

__all__ = ["ENTRIES", "write"]

_write_graph = copy_graph(__file__, "generator.py")


def write(files: Path, directory: Path) -> None:
    """Write the graph's folder, and below it the model and its tokenizer as OpenVINO IR.

    Raises:
        WheelUnavailable: OpenVINO GenAI is not installed, or it failed.
    """
    _write_graph(files, directory)
    model = directory / "model"
    model.mkdir()
    convert_gguf(files / SMOLLM2, model, "text_generation")


ENTRIES = {"text_generation": write}
