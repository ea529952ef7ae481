"""What requests to load and to unload models say, the same on gRPC and on REST."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.core.errors import FailedPrecondition, InvalidRequest
from ovmstrio.serving.broadcast_changes import control_of_all
from ovmstrio.util.truncation import cut, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.serving.broadcast_changes import LoadsByName
    from ovmstrio.serving.data_plane import DataPlane

__all__ = ["control_of", "load_parameters", "unload_parameters"]

_CONFIG: Final = "config"
_FILE: Final = "file:"
_DEPENDENTS: Final = "unload_dependents"
_MAX_CONFIG_CHARACTERS: Final = 64 * 1024


def control_of(plane: DataPlane) -> LoadsByName:
    """Give what loads and unloads services by name.

    Raises:
        FailedPrecondition: the server was not started so that it does.
    """
    control = control_of_all(plane)
    if control is None:
        raise FailedPrecondition(
            "models are not loaded and unloaded by name, as the server follows its configuration; "
            "--model_control explicit lets clients do it"
        )
    return control


def load_parameters(given: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """Read the settings of a load, as JSON and None where there are none, and its files by their parameters' names.

    Raises:
        InvalidRequest: a parameter is unknown or of another type; files over REST are base64.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in given.items():
        if name == _CONFIG:
            config = _json_of(value)
        elif name.startswith(_FILE):
            files[name] = _bytes_of(name, value)
        else:
            raise _unknown(name, f"{_CONFIG} and {_FILE}<version>/<name>")
    return config, files


def unload_parameters(given: Mapping[str, Any]) -> bool:
    """Tell whether what a model calls is to be unloaded with it.

    Raises:
        InvalidRequest: a parameter is unknown or of another type.
    """
    for name, value in given.items():
        if name != _DEPENDENTS:
            raise _unknown(name, _DEPENDENTS)
        if not isinstance(value, bool):
            raise InvalidRequest(f"the parameter {_DEPENDENTS} must be true or false, got {shown(value, 40)}")
    return bool(given.get(_DEPENDENTS, False))


def _json_of(value: object) -> str:
    text = orjson.dumps(value).decode() if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidRequest(f"the parameter {_CONFIG} must be a text of JSON, got {type(value).__name__}")
    if len(text) > _MAX_CONFIG_CHARACTERS:
        # The reader of configurations notes the line of each value, which takes microseconds for each.
        raise InvalidRequest(
            f"the parameter {_CONFIG}: expected at most {_MAX_CONFIG_CHARACTERS} characters, got {len(text)}"
        )
    return text


def _bytes_of(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        if isinstance(value, str):
            return b64decode(value, validate=True)
    except ValueError:
        pass
    raise InvalidRequest(f"the parameter {cut(name, 80)!r} must be the content of a file (over REST as base64)")


def _unknown(name: str, known: str) -> InvalidRequest:
    return InvalidRequest(f"the parameter {cut(name, 80)!r} is not known, expected {known}")
