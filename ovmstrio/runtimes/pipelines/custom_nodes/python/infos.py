"""What the functions of a file give: names, types and shapes of inputs and outputs, and the arrays of ``execute``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ovmstrio.core.datatypes import BY_NAME, BY_OPENVINO_NAME, BYTES, Datatype
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import ItemInfo, read_only
from ovmstrio.runtimes.pipelines.custom_nodes.python.file_failures import UserFile
from ovmstrio.runtimes.pipelines.custom_nodes.python.node_functions import UserFunction
from ovmstrio.work.user_code.places import place_of

__all__ = ["DATATYPE_OF", "WrongOutputsError", "read_infos", "read_outputs"]

_EXAMPLE: Final = 'return {"name": ("FP32", [1, -1])}'
_DYNAMIC: Final = -1
_CODE: Final = "NODE_LIBRARY_METADATA_FAILED"

DATATYPE_OF: Final[Mapping[np.dtype[Any], Datatype]] = {
    datatype.numpy: datatype for name, datatype in BY_NAME.items() if name not in ("BF16", "BYTES")
}
"""What arrays of a dtype hold."""


class _WrongInfoError(Exception):
    """One entry cannot be used."""


def read_infos(given: Any, function: UserFunction, file: UserFile) -> dict[str, ItemInfo]:
    """Read what a function gives: names, element types and shapes.

    An element type is a name (``FP32``, ``INT32``, or OVMS's ``I32``), a dtype of numpy's, or None if there is nothing
    to say.  A size of -1 or 0 means that any will do.

    Raises:
        ConfigError: an entry cannot be used; all are listed.
    """
    line = file.line_of(place_of(function.call))
    if not isinstance(given, Mapping) or not given:
        message = f"{function.name} must give a dict with at least one name, not {_shown(given)}"
        raise ConfigError([file.problem(_CODE, message, line=line, suggestion=_EXAMPLE)])
    infos: dict[str, ItemInfo] = {}
    problems = []
    for name, value in given.items():
        try:
            infos[name] = _info(name, value)
        except _WrongInfoError as wrong:
            message = f"{function.name}: {_shown(name)}: {wrong}"
            problems.append(file.problem(_CODE, message, line=line, suggestion=_EXAMPLE))
    if problems:
        raise ConfigError(problems)
    return infos


def _info(name: Any, value: Any) -> ItemInfo:
    if not isinstance(name, str) or not name:
        raise _WrongInfoError("a name must be a text that is not empty")
    if not isinstance(value, tuple | list) or len(value) != 2:  # noqa: PLR2004 - type and shape
        raise _WrongInfoError(f"an element type and a shape are expected, not {_shown(value)}")
    return ItemInfo(name, _datatype(value[0]), _shape(value[1]))


def _datatype(value: Any) -> Datatype | None:
    if value is None:
        return None
    found = None
    if isinstance(value, str):
        found = BY_NAME.get(value.upper()) or BY_OPENVINO_NAME.get(value.lower())
    if found is None:
        try:
            found = DATATYPE_OF.get(np.dtype(value).newbyteorder("<"))
        except TypeError:
            found = None
    if found is None or found is BYTES:
        raise _WrongInfoError(f"{_shown(value)} is no element type of tensors; texts travel as UINT8 of two dimensions")
    return found


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _WrongInfoError(f"a shape is a list of sizes, not {_shown(value)}")
    for size in value:
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < _DYNAMIC:
            raise _WrongInfoError(f"{_shown(size)} is no size; -1 or 0 stands for any")
    return tuple(int(size) or _DYNAMIC for size in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."  # noqa: PLR2004 - fits a line


class WrongOutputsError(Exception):
    """What ``execute`` gave cannot be used; ``code`` says how."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def read_outputs(given: Any) -> dict[str, Array]:
    """Check what ``execute`` gave, and give arrays that are C-contiguous and in this machine's byte order.

    Raises:
        WrongOutputsError: it is no dict of arrays with element types of tensors.
    """
    if not isinstance(given, Mapping) or not given:
        found = "an empty dict" if isinstance(given, Mapping) else type(given).__name__
        code = (
            "NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT" if isinstance(given, Mapping) else "NODE_LIBRARY_OUTPUTS_CORRUPTED"
        )
        raise WrongOutputsError(code, f"execute must return a dict with an array for each output, not {found}")
    # The user may keep an array, or give it twice, so that nobody may take it for his own.
    return read_only({_name(name): _array(name, value) for name, value in given.items()})


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        text = f"execute returned an output without a name: the key is {name!r}"
        raise WrongOutputsError("NODE_LIBRARY_OUTPUT_MISSING_NAME", text)
    return name


def _array(name: str, value: Any) -> Array:
    if not isinstance(value, np.ndarray | np.generic):
        text = f"output {name!r} must be an array of numpy's, not {type(value).__name__}; make it with np.asarray"
        raise WrongOutputsError("NODE_LIBRARY_OUTPUTS_CORRUPTED", text)
    array = np.asarray(value)
    dtype = array.dtype.newbyteorder("<")
    if dtype not in DATATYPE_OF:
        text = f"output {name!r} has dtype {array.dtype}, which no tensor has; texts travel as uint8 of two dimensions"
        raise WrongOutputsError("NODE_LIBRARY_INVALID_PRECISION", text)
    return np.asarray(array, dtype, order="C")
