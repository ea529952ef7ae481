"""The process's OpenVINO core, its devices, and OpenVINO's exceptions."""

from __future__ import annotations

import re
import threading
from functools import cache
from typing import Final

import openvino as ov
from openvino.frontend import (
    GeneralFailure,
    InitializationFailure,
    NotImplementedFailure,
    OpConversionFailure,
    OpValidationFailure,
)

from ovmstrio.util.truncation import text_of

OPENVINO_ERRORS: Final = (
    RuntimeError,
    ValueError,
    TypeError,
    GeneralFailure,
    InitializationFailure,
    NotImplementedFailure,
    OpConversionFailure,
    OpValidationFailure,
)
"""All exceptions of OpenVINO's bindings; those of the frontends share no base with the others."""

_NOISE: Final = re.compile(
    r"^(Exception from |Check '.*' failed at |While validating |FrontEnd API failed |\[ ?ERROR)|^$"
)
_POSITION: Final = re.compile(r"(Caught exception: )?(Exception from \S+:\d+:|Check '[^']*' failed at \S+:\d+:)\s*")
_MAX_CHARACTERS: Final = 600

_lock = threading.Lock()
_make_core = cache(ov.Core)


def core() -> ov.Core:
    """Return the process's core, created at the first call; thread-safe."""
    with _lock:
        return _make_core()


def available_devices() -> list[str]:
    """Return the available devices, such as ``CPU``."""
    return list(core().available_devices)


def openvino_error_message(error: BaseException) -> str:
    """Return the message of an OpenVINO error without source positions."""
    lines = [line.strip() for line in text_of(error).splitlines()]
    kept = [_POSITION.sub("", line) for line in lines if not _NOISE.match(line)]
    text = " ".join(line for line in kept if line) or " ".join(lines)
    return text[:_MAX_CHARACTERS]
