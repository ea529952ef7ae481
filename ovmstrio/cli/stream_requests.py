"""Requests of ``ovms stream``, from its options or from JSON lines."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.cli.tensor_contents import load_numpy
from ovmstrio.client.api import Parameter, StreamRequest
from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ovmstrio.client.api import Value

_STANDARD_INPUT: Final = "-"
_KEYS: Final = frozenset({"inputs", "timestamp", "parameters", "id"})
_BOOLEANS: Final[dict[str, bool]] = {"true": True, "false": False}
_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_INTEGER: Final = re.compile(r"[+-]?\d+", re.ASCII)
_INT64: Final = range(-(2**63), 2**63)
_MAX_SHOWN: Final = 60


def one_request(
    given: Sequence[str], names: Sequence[str], timestamp: int | None, parameters: Sequence[str]
) -> StreamRequest:
    """Create the request that the options describe.

    Raises:
        InvalidRequest: an input is unknown, repeated or cannot be read, a parameter has no name, or a number is too
            large.
    """
    inputs: dict[str, Value] = {}
    for argument in given:
        name, text = _split(argument, names)
        if name in inputs:
            raise InvalidRequest(f"input {name} is given twice")
        inputs[name] = _value(text)
    stamp = None if timestamp is None else _int64("--timestamp", timestamp)
    return StreamRequest(inputs, stamp, "", dict(map(_parameter, parameters)))


def _split(argument: str, names: Sequence[str]) -> tuple[str, str]:
    """Split ``NAME=VALUE``; the name of the only input may be omitted."""
    name, equals, rest = argument.partition("=")
    if equals and name in names:
        return name, rest
    if len(names) == 1 and not (equals and _NAME.fullmatch(name) and not _is_file(argument)):
        return names[0], argument
    if equals and _NAME.fullmatch(name):
        hint = f"; to send it as text, write {names[0]}={argument[:_MAX_SHOWN]}" if len(names) == 1 else ""
        raise InvalidRequest(f'unknown input "{name}"; the graph takes {", ".join(names) or "none"}{hint}')
    known = ", ".join(f"--input {each}=..." for each in names)
    raise InvalidRequest(f"{argument[:_MAX_SHOWN]}: the graph has {len(names)} inputs; name one{known and ': '}{known}")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:
        # Too long for a name.
        return False


def _value(text: str) -> Value:
    if not text.startswith("@") and not _is_file(text):
        return os.fsencode(text)
    path = Path(text.removeprefix("@"))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}") from None
    return next(iter(load_numpy(content, str(path)).values())) if path.suffix == ".npy" else content


def _parameter(argument: str) -> tuple[str, Parameter]:
    name, equals, text = argument.partition("=")
    if not equals or not name:
        raise InvalidRequest(f"--parameter {argument!r}: expected NAME=VALUE")
    if text in _BOOLEANS:
        return name, _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return name, _int64(f"--parameter {name}", int(text))
    is_quoted = len(text) > 1 and text.startswith('"') and text.endswith('"')
    return name, text[1:-1] if is_quoted else text


def _int64(what: str, number: int) -> int:
    if number not in _INT64:
        raise InvalidRequest(f"{what}: {number} is not a 64-bit integer")
    return number


def are_typed(source: str) -> bool:
    """Return whether requests are read from an interactive terminal."""
    return source == _STANDARD_INPUT and sys.stdin.isatty()


def read_lines(source: str, names: Sequence[str]) -> Iterator[StreamRequest]:
    """Read one request per line of a file or of standard input, when the stream requests it.

    Raises:
        InvalidRequest: the file cannot be opened; while iterating, a line is not a request.
    """
    try:
        if source == _STANDARD_INPUT:
            # Python crashes at exit if a thread is blocked in ``sys.stdin``.
            return _read(open(sys.stdin.fileno(), "rb", closefd=False), names)
        return _read(Path(source).open("rb"), names)
    except OSError as error:
        raise InvalidRequest(f"--requests {source}: {error.strerror or error}") from None


def _read(lines: IO[bytes], names: Sequence[str]) -> Iterator[StreamRequest]:
    with lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _request(line, f"line {number}", names)


def _request(line: bytes, where: str, names: Sequence[str]) -> StreamRequest:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: expected a JSON object: {error}") from None
    inputs = document.get("inputs", {}) if isinstance(document, dict) else None
    if not isinstance(inputs, dict):
        shown = line.strip()[:_MAX_SHOWN].decode(errors="replace")
        raise InvalidRequest(f'{where}: expected {{"inputs": {{NAME: VALUE}}}}, got {shown}')
    unknown = [*(document.keys() - _KEYS), *(inputs.keys() - set(names))]
    if unknown:
        raise InvalidRequest(f"{where}: unknown: {', '.join(sorted(unknown))}; the inputs are {', '.join(names)}")
    return StreamRequest(
        {name: _json_value(value, f"{where}: {name}") for name, value in inputs.items()},
        _json_timestamp(document.get("timestamp"), where),
        str(document.get("id", "")),
        _json_parameters(document.get("parameters", {}), where),
    )


def _json_timestamp(value: Any, where: str) -> int | None:
    if value is not None and type(value) is not int:
        raise InvalidRequest(f"{where}: timestamp: expected an integer, got {json.dumps(value)[:_MAX_SHOWN]}")
    return None if value is None else _int64(f"{where}: timestamp", value)


def _json_parameters(parameters: Any, where: str) -> Mapping[str, Parameter]:
    if not isinstance(parameters, dict) or not all(isinstance(each, Parameter) for each in parameters.values()):
        raise InvalidRequest(f"{where}: parameters: expected an object of integers, truth values and texts")
    for name, value in parameters.items():
        if isinstance(value, int):
            _int64(f"{where}: parameter {name}", value)
    return parameters


def _json_value(value: Any, where: str) -> Value:
    try:
        if isinstance(value, str):
            return value.encode()
        array = np.array(value)
    except ValueError as error:
        raise InvalidRequest(f"{where}: {error}") from None
    if array.dtype.kind not in "bif":
        raise InvalidRequest(f"{where}: expected a text, numbers or truth values, got {json.dumps(value)[:_MAX_SHOWN]}")
    return array
