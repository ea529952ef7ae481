"""The requests of ``ovms stream``: out of its options, or out of lines of JSON."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.client.streaming import StreamRequest
from ovmstrio.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["one_request", "read_lines"]

_STANDARD_INPUT: Final = "-"
_KEYS: Final = frozenset({"inputs", "timestamp", "parameters", "id"})
_WORDS: Final[dict[str, bool]] = {"true": True, "false": False}

Value = bytes | np.ndarray[Any, Any]


def one_request(
    given: Sequence[str], names: Sequence[str], timestamp: int | None, parameters: Sequence[str]
) -> StreamRequest:
    """Make the request that the options describe.

    Raises:
        InvalidRequest: an input is unknown, given twice or cannot be read, or a parameter has no name.
    """
    inputs: dict[str, Value] = {}
    for argument in given:
        name, text = _split(argument, names)
        if name in inputs:
            raise InvalidRequest(f"input {name} is given twice")
        inputs[name] = _value(text)
    return StreamRequest(inputs, timestamp, "", dict(map(_parameter, parameters)))


def _split(argument: str, names: Sequence[str]) -> tuple[str, str]:
    name, equals, rest = argument.partition("=")
    if equals and name in names:
        return name, rest
    if len(names) == 1:
        return names[0], argument
    known = ", ".join(names)
    raise InvalidRequest(f"--input {argument[:40]!r}: expected NAME=VALUE, NAME being one of the inputs: {known}")


def _value(text: str) -> Value:
    path = Path(text.removeprefix("@"))
    try:
        if not text.startswith("@") and not path.is_file():
            return text.encode()
        return np.load(path, allow_pickle=False) if path.suffix == ".npy" else path.read_bytes()
    except OSError as error:
        # A text may be too long for a name, or hold what no name may.
        if not text.startswith("@"):
            return text.encode()
        raise InvalidRequest(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        if not text.startswith("@") and "\0" in text:
            return text.encode()
        raise InvalidRequest(f"{path}: no array can be read: {error}") from None


def _parameter(argument: str) -> tuple[str, bool | int | str]:
    name, equals, text = argument.partition("=")
    if not equals or not name:
        raise InvalidRequest(f"--parameter {argument!r}: expected NAME=VALUE")
    if text in _WORDS:
        return name, _WORDS[text]
    try:
        return name, int(text)
    except ValueError:
        return name, text


def read_lines(source: str, names: Sequence[str]) -> Iterator[StreamRequest]:
    """Read a request of each line of a file, or of standard input, when the stream asks for it.

    Raises:
        InvalidRequest: the file cannot be opened; while it is read, a line is not a request.
    """
    try:
        lines: IO[str] = sys.stdin if source == _STANDARD_INPUT else Path(source).open(encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise InvalidRequest(f"--requests {source}: {error.strerror or error}") from None
    return _read(lines, names)


def _read(lines: IO[str], names: Sequence[str]) -> Iterator[StreamRequest]:
    with ExitStack() as stack:
        if lines is not sys.stdin:
            stack.enter_context(lines)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _request(line, f"line {number}", names)


def _request(line: str, where: str, names: Sequence[str]) -> StreamRequest:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: expected a JSON object: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("inputs", {}), dict):
        raise InvalidRequest(f'{where}: expected {{"inputs": {{NAME: VALUE}}}}, got {line.strip()[:60]}')
    unknown = [*(document.keys() - _KEYS), *(document.get("inputs", {}).keys() - set(names))]
    if unknown:
        raise InvalidRequest(f"{where}: unknown: {', '.join(sorted(unknown))}; the inputs are {', '.join(names)}")
    inputs = {name: _json_value(value, f"{where}: {name}") for name, value in document.get("inputs", {}).items()}
    return StreamRequest(
        inputs, document.get("timestamp"), str(document.get("id", "")), _json_parameters(document, where)
    )


def _json_parameters(document: Mapping[str, Any], where: str) -> dict[str, bool | int | str]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict) or not all(isinstance(each, bool | int | str) for each in parameters.values()):
        raise InvalidRequest(f"{where}: parameters: expected an object of numbers, truth values and texts")
    return parameters


def _json_value(value: Any, where: str) -> Value:
    if isinstance(value, str):
        return value.encode()
    try:
        array = np.array(value)
    except ValueError as error:
        raise InvalidRequest(f"{where}: {error}") from None
    if array.dtype.kind not in "bif":
        raise InvalidRequest(f"{where}: expected a text, numbers or truth values, got {str(value)[:40]}")
    return array
