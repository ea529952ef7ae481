"""Read a model's file, in whatever way OpenVINO can."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import openvino as ov
import structlog

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.openvino.paddle import read_paddle
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, core, reason

__all__ = ["read_model", "read_onnx_content"]

log = structlog.get_logger(__name__)

_ONNX: Final = ".onnx"
_PADDLE: Final = ".pdmodel"


def read_model(file: Path) -> ov.Model:
    """Read a model of any framework.  Blocks for as long as that takes.

    Raises:
        ConfigError: OpenVINO cannot; the message gives the file and OpenVINO's own reason.
    """
    if file.suffix.lower() == _PADDLE:
        return read_paddle(file)
    try:
        return core().read_model(file)
    except OPENVINO_ERRORS as error:
        model = read_onnx_content(file)
        if model is not None:
            return model
        problem = Problem(f"OpenVINO cannot read the model: {reason(error)}", file=str(file))
        raise ConfigError([problem]) from error


def read_onnx_content(file: Path) -> ov.Model | None:
    """Read an ONNX file whose reading by its path has failed by its content; None if that fails, too.

    OpenVINO 2026.4 asks a file for attributes of subgraphs, and cannot answer itself ("get_attribute is not implemented
    for this FrontEnd class"), where it converts the same bytes.  What has its weights in other files is read by its
    path alone, for bytes have no place that those could be beside.
    """
    if file.suffix.lower() != _ONNX:
        return None
    try:
        model = core().read_model(file.read_bytes())
    except (*OPENVINO_ERRORS, OSError):
        return None
    log.info("model read by its content: OpenVINO cannot read it by its path", path=str(file))
    return model
