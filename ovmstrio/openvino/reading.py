"""Read a model's file, in whatever way OpenVINO can."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import openvino as ov
import structlog

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.openvino.external_data import check_external_data
from ovmstrio.openvino.paddle import read_paddle
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, core, reason
from ovmstrio.util.regular_files import read_regular_bytes

__all__ = ["check_files", "read_model", "read_onnx_content"]

log = structlog.get_logger(__name__)

_ONNX: Final = ".onnx"
_PADDLE: Final = ".pdmodel"


def read_model(file: Path) -> ov.Model:
    """Read a model of any framework.  Blocks for as long as that takes.

    Raises:
        ConfigError: OpenVINO cannot, or external data is not in the model's folder; the message gives the file and
            OpenVINO's own reason.
    """
    if file.suffix.lower() == _PADDLE:
        return read_paddle(file)
    check_files(file)
    try:
        return core().read_model(file)
    except OPENVINO_ERRORS as error:
        model = read_onnx_content(file)
        if model is not None:
            return model
        problem = Problem(f"OpenVINO cannot read the model: {reason(error)}", file=str(file))
        raise ConfigError([problem]) from error


def check_files(file: Path) -> bool:
    """Check that a model's file is a regular file and that its external data is in its folder; blocking.

    Returns:
        Whether the model has external data.

    Raises:
        ConfigError: one of them is not.
    """
    try:
        return not file.is_dir() and check_external_data(file)
    except OSError as error:
        raise ConfigError([Problem(f"the file cannot be read: {error.strerror}", file=str(file))]) from None


def read_onnx_content(file: Path) -> ov.Model | None:
    """Read an ONNX file whose reading by its path has failed by its content; None if that fails, too.

    OpenVINO 2026.4 asks a file for attributes of subgraphs, and cannot answer itself ("get_attribute is not implemented
    for this FrontEnd class"), where it converts the same bytes.  A model with external data is read by its
    path only: OpenVINO would look for the data in the working directory.
    """
    if file.suffix.lower() != _ONNX or check_files(file):
        return None
    try:
        model = core().read_model(read_regular_bytes(file, max_bytes=None))
    except (*OPENVINO_ERRORS, OSError):
        return None
    log.info("model read by its content: OpenVINO cannot read it by its path", path=str(file))
    return model
