"""Conversion of a GGUF file to OpenVINO IR with tokenizer and detokenizer, which loads faster."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from ovmstrio.extras import Extra, install_command
from ovmstrio.samples.wheels import WheelUnavailable

__all__ = ["SMOLLM2", "convert_gguf"]

SMOLLM2: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"

_CONVERT: Final = """
import pathlib, sys
from ovmstrio.inference.engine.gguf_conversion import write_files
write_files(pathlib.Path(sys.argv[1]))
"""


def convert_gguf(source: Path, model: Path, sample: str) -> None:
    """Convert ``source`` and move the resulting files into the existing folder ``model``.

    OpenVINO GenAI runs in a subprocess, so that its memory is released after the conversion.

    Raises:
        WheelUnavailable: OpenVINO GenAI is not installed, or it failed.
    """
    if importlib.util.find_spec("openvino_genai") is None:
        raise WheelUnavailable(f"the sample {sample} needs OpenVINO GenAI: {install_command(Extra.LLM)}")
    done = subprocess.run(  # noqa: S603 - our own code, on a verified file
        [sys.executable, "-c", _CONVERT, str(source.resolve())],
        capture_output=True,
        text=True,
        check=False,
        process_group=0,  # an interrupt is for the command
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise WheelUnavailable(f"OpenVINO GenAI could not convert {source.name}: {done.stderr.strip()[-500:]}")
    for path in source.resolve().parent.glob("openvino_*"):
        path.replace(model / path.name)
