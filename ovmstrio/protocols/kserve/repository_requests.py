"""Parameters of load and unload requests, shared by gRPC and REST."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.core.errors import FailedPrecondition, InvalidRequest
from ovmstrio.serving.broadcast_changes import server_model_control
from ovmstrio.util.truncation import cut, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.serving.broadcast_changes import ServerModelControl
    from ovmstrio.serving.data_plane import DataPlane

_CONFIG: Final = "config"
_FILE: Final = "file:"
_DEPENDENTS: Final = "unload_dependents"
_MAX_CONFIG_CHARACTERS: Final = 64 * 1024


def model_control(plane: DataPlane) -> ServerModelControl:
    """Return the model control, or raise ``FailedPrecondition`` if explicit model control is off."""
    control = server_model_control(plane)
    if control is None:
        raise FailedPrecondition(
            "loading and unloading by name is disabled: the server follows its configuration; "
            "start with --model_control explicit"
        )
    return control


def load_parameters(given: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """Return the model configuration (JSON or None) and the files by parameter name; REST sends files as base64."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in given.items():
        if name == _CONFIG:
            config = _config_json(value)
        elif name.startswith(_FILE):
            files[name] = _file_content(name, value)
        else:
            raise _unknown(name, f"{_CONFIG} and {_FILE}<version>/<name>")
    return config, files


def unload_parameters(given: Mapping[str, Any]) -> bool:
    """Return whether to unload the dependents too."""
    for name, value in given.items():
        if name != _DEPENDENTS:
            raise _unknown(name, _DEPENDENTS)
        if not isinstance(value, bool):
            raise InvalidRequest(f"the parameter {_DEPENDENTS} must be true or false, got {shown(value, 40)}")
    return bool(given.get(_DEPENDENTS, False))


def _config_json(value: object) -> str:
    text = orjson.dumps(value).decode() if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidRequest(f"the parameter {_CONFIG} must be JSON text, got {type(value).__name__}")
    if len(text) > _MAX_CONFIG_CHARACTERS:
        # The configuration parser tracks the line of each value, which costs microseconds per value.
        raise InvalidRequest(
            f"the parameter {_CONFIG}: expected at most {_MAX_CONFIG_CHARACTERS} characters, got {len(text)}"
        )
    return text


def _file_content(name: str, value: object) -> bytes:
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
