"""Write the folder of the language model, in the form that loads fastest."""

from __future__ import annotations

from pathlib import Path

from ovmstrio_samples.gguf_files import SMOLLM2, convert_gguf

__all__ = ["ENTRIES", "write"]


def write(files: Path, directory: Path) -> None:
    """Write the model, its tokenizer and its detokenizer as OpenVINO IR.

    Raises:
        WheelUnavailable: OpenVINO GenAI is not installed, or it failed.
    """
    convert_gguf(files / SMOLLM2, directory, "chat")


ENTRIES = {"chat": write}
