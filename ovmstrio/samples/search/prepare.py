"""Preparation of the sample search: writes all-MiniLM-L6-v2 in Optimum's layout, with tokenizer and length limit."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import openvino as ov

from ovmstrio.extras import Extra, install_command
from ovmstrio.samples.embedding.prepare import build
from ovmstrio.samples.wheels import WheelUnavailable

__all__ = ["ENTRIES", "write"]


def write(files: Path, directory: Path) -> None:
    """Write the model, with pooling and FP16 weights, and the tokenizer.

    Raises:
        WheelUnavailable: OpenVINO Tokenizers is not installed, or it failed.
    """
    if importlib.util.find_spec("openvino_tokenizers") is None:
        raise WheelUnavailable(f"the sample search needs OpenVINO's tokenizers: {install_command(Extra.LLM)}")
    ov.save_model(build(files), directory / "openvino_model.xml")
    shutil.copyfile(files / "config.json", directory / "config.json")
    # Importing openvino_tokenizers changes every ov.Core of the process, so it runs in a subprocess.
    module = "ovmstrio.samples.search.bert_tokenizer"
    done = subprocess.run(  # noqa: S603 - our own code, on a verified file
        [sys.executable, "-m", module, str(files / "tokenizer.json"), str(directory)],
        capture_output=True,
        text=True,
        check=False,
        process_group=0,  # an interrupt is for the command
    )
    if done.returncode:
        raise WheelUnavailable(f"OpenVINO's tokenizers could not convert this one: {done.stderr.strip()[-500:]}")


ENTRIES = {"search": write}
