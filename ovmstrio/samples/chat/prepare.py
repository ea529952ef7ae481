"""Preparation of the sample chat: converts the language model to OpenVINO IR, which loads faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from ovmstrio.samples.gguf_files import SMOLLM2, convert_gguf

__all__ = ["ENTRIES", "write"]

_CONTEXT: Final = 8192
"""Context length in the GGUF file, which the conversion drops."""
_SAMPLING: Final = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""Defaults of requests: so small a model rambles at the usual temperature of 1."""


def write(files: Path, directory: Path) -> None:
    """Write the model, tokenizer and detokenizer as OpenVINO IR, the context length and sampling defaults.

    Raises:
        WheelUnavailable: OpenVINO GenAI is not installed, or it failed.
    """
    convert_gguf(files / SMOLLM2, directory, "chat")
    for name, content in (("config", {"max_position_embeddings": _CONTEXT}), ("generation_config", _SAMPLING)):
        (directory / f"{name}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


ENTRIES = {"chat": write}
