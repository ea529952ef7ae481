"""Put the language model beside the graph, in the form that loads fastest."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from ovmstrio.extras import Extra, way_to_install
from ovmstrio_samples.copying import copy_graph
from ovmstrio_samples.wheels import WheelUnavailable

__all__ = ["ENTRIES", "write"]

_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERT: Final = "import sys, openvino_genai as g; g.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"

_write_graph = copy_graph(__file__, "generator.py")


def write(files: Path, directory: Path) -> None:
    """Write the graph's folder, and below it the model and its tokenizer as OpenVINO IR.

    OpenVINO GenAI converts in a process of its own, which gives all of its memory back.

    Raises:
        WheelUnavailable: OpenVINO GenAI is not installed, or it failed.
    """
    if importlib.util.find_spec("openvino_genai") is None:
        raise WheelUnavailable(f"the sample text_generation needs OpenVINO GenAI: {way_to_install(Extra.LLM)}")
    _write_graph(files, directory)
    source = files.resolve() / _GGUF
    done = subprocess.run(  # noqa: S603 - our own code, on a file that we have checked
        [sys.executable, "-c", _CONVERT, str(source)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise WheelUnavailable(f"OpenVINO GenAI could not convert {_GGUF}: {done.stderr.strip()[-500:]}")
    model = directory / "model"
    model.mkdir()
    for path in source.parent.glob("openvino_*"):
        path.replace(model / path.name)


ENTRIES = {"text_generation": write}
