"""The one OpenVINO core of the process, and what OpenVINO's errors say once its source positions are taken out."""

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

__all__ = ["OPENVINO_ERRORS", "core", "devices", "reason"]

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
"""Everything that OpenVINO's bindings raise; its frontends' failures share no base with the rest."""

_NOISE: Final = re.compile(
    r"^(Exception from |Check '.*' failed at |While validating |FrontEnd API failed |\[ ?ERROR)|^$"
)
_POSITION: Final = re.compile(r"(Caught exception: )?(Exception from \S+:\d+:|Check '[^']*' failed at \S+:\d+:)\s*")
_LONGEST: Final = 600

_lock = threading.Lock()


@cache
def _make_core() -> ov.Core:
    return ov.Core()


def core() -> ov.Core:
    """Give the process's core, made at the first call; safe from any thread."""
    with _lock:
        return _make_core()


def devices() -> list[str]:
    """List the devices that OpenVINO can use here, such as ``CPU``."""
    return list(core().available_devices)


def reason(error: BaseException) -> str:
    """Take OpenVINO's own sentence out of the positions in its source code that surround it."""
    lines = [line.strip() for line in text_of(error).splitlines()]
    kept = [_POSITION.sub("", line) for line in lines if not _NOISE.match(line)]
    text = " ".join(line for line in kept if line) or " ".join(lines)
    return text[:_LONGEST]
