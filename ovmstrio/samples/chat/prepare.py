"""Preparation of the sample chat: converts the language model to OpenVINO IR, which loads faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from ovmstrio.samples.gguf_files import SMOLLM2, convert_gguf

__all__ = ["ENTRIES", "write"]

_CONTEXT: Final = 8192
"""Context length in the GGUF file, which the conversion drops."""


def write(files: Path, directory: Path) -> None:
    """Write the model, tokenizer and detokenizer as OpenVINO IR, and the context length.

    Raises:
        WheelUnavailable: OpenVINO GenAI is not installed, or it failed.
    """
    convert_gguf(files / SMOLLM2, directory, "chat")
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": _CONTEXT}) + "\n", encoding="utf-8")


ENTRIES = {"chat": write}
