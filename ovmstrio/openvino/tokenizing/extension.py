"""The library with the operations of tokenizers, which OpenVINO itself does not have."""

from __future__ import annotations

import ctypes
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.extras import Extra, way_to_install
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, core, reason

__all__ = ["load_tokenizer_operations"]

_PACKAGE: Final = "openvino_tokenizers"
_LIBRARY: Final = "libopenvino_tokenizers*.so*"

_lock: Final = threading.Lock()
_loaded: list[ctypes.CDLL] = []


def load_tokenizer_operations() -> None:
    """Let the process's core know the operations; once, from any thread.

    The package is not imported: that would change what every core of the process does.

    Raises:
        ConfigError: the package is not there, or not of this version of OpenVINO.
    """
    with _lock:
        if _loaded:
            return
        path = _find()
        try:
            core().add_extension(str(path))
            # Objects of the library may be the last that the process ends with, so that it must stay until then.
            _loaded.append(ctypes.CDLL(str(path)))
        except (*OPENVINO_ERRORS, OSError) as error:
            message = f"the tokenizers' operations do not fit this OpenVINO: {reason(error)}"
            raise ConfigError([_problem(message, path)]) from error


def _find() -> Path:
    package = find_spec(_PACKAGE)
    for folder in package.submodule_search_locations or () if package is not None else ():
        for path in sorted((Path(folder) / "lib").glob(_LIBRARY)):
            return path
    raise ConfigError([_problem(f"tokenizers need the package {_PACKAGE}, which is not there")])


def _problem(message: str, path: Path | None = None) -> Problem:
    return Problem(message, file="" if path is None else str(path), suggestion=way_to_install(Extra.LLM))
