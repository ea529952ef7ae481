"""Write the folder of the language model, in the form that loads fastest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from ovmstrio_samples.gguf_files import SMOLLM2, convert_gguf

__all__ = ["ENTRIES", "write"]

_CONTEXT: Final = 8192
"""What the GGUF file says; the conversion loses it."""


def write(files: Path, directory: Path) -> None:
    """Write the model, its tokenizer and its detokenizer as OpenVINO IR, and how many tokens it takes.

    Raises:
        WheelUnavailable: OpenVINO GenAI is not installed, or it failed.
    """
    convert_gguf(files / SMOLLM2, directory, "chat")
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": _CONTEXT}) + "\n", encoding="utf-8")


ENTRIES = {"chat": write}
