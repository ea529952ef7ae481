"""Read a model with the frontend of the framework that wrote it: asked for any, OpenVINO lets all try and complain."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import openvino as ov
from openvino.frontend import FrontEndManager, OpConversionFailure

from ovmstrio.openvino.conversion.sources import refused
from ovmstrio.openvino.conversion.torch_archives import EXPORT, SCRIPT
from ovmstrio.openvino.conversion.torch_programs import read_torch
from ovmstrio.openvino.paddle import read_paddle
from ovmstrio.openvino.reading import check_files, read_onnx_content
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason

__all__ = ["read_source"]

_FRONTENDS: Final = {
    "OpenVINO IR": "ir",
    "ONNX": "onnx",
    "TensorFlow frozen graph": "tf",
    "TensorFlow SavedModel": "tf",
    "TensorFlow Lite": "tflite",
}


def read_source(source: Path, framework: str) -> ov.Model:
    """Read a model.

    Args:
        source: the file, or the folder that the framework takes for one model.
        framework: what :func:`~.sources.framework_of` says of it.

    Raises:
        ConfigError: it cannot be read or converted; the message tells why.
    """
    if framework == "PaddlePaddle":
        model = read_paddle(source)
    elif framework in {EXPORT, SCRIPT}:
        model = read_torch(source, framework)
    else:
        model = _read(source, framework)
    if not model.outputs:
        # An empty file is a whole model to some readers, and nothing could be served of it.
        raise refused(source, f"as {framework} it is a model without outputs", "is the file complete?")
    return model


def _read(source: Path, framework: str) -> ov.Model:
    check_files(source)
    try:
        frontend = FrontEndManager().load_by_framework(_FRONTENDS[framework])
        return frontend.convert(frontend.load(str(source)))
    except OpConversionFailure as error:
        model = read_onnx_content(source)
        if model is not None:
            return model
        raise refused(source, f"OpenVINO cannot convert all of it: {reason(error)}") from error
    except OPENVINO_ERRORS as error:
        raise refused(source, f"cannot be read as {framework}: {reason(error)}", "is the file complete?") from error
