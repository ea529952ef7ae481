"""Conversion of files of all formats to the input tensors of a model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.cli.tensor_contents import WAVE, choose, load_numpy, read_json, read_packed, sniff
from ovmstrio.cli.tensor_conversion import to_own_type, to_type
from ovmstrio.cli.tensor_images import ImageOptions, decode_image, is_image
from ovmstrio.cli.tensor_sounds import decode_wave
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import BY_NAME, BYTES
from ovmstrio.encoding.raw_contents import bytes_array
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.client import TensorInfo
    from ovmstrio.core.tensor import Array

_AS_DECODED: Final = ImageOptions()
_STANDARD_INPUT: Final = "-"
_READ_SUFFIXES: Final = frozenset({".npy", ".npz", ".json", WAVE})


def read_inputs(
    arguments: Sequence[str],
    expected: Sequence[TensorInfo],
    report: Callable[[str], None],
    images: ImageOptions = _AS_DECODED,
) -> dict[str, Any]:
    """Read ``file`` or ``name=file`` arguments into the inputs of a model: arrays, or bytes.

    An argument that is no file may be JSON: ``[[1, 2]]``, ``name=[[1, 2]]``, or an object of values by name.

    Conversions are passed to ``report``. With ``images.encoded``, files without arrays become ``BYTES`` of one element
    for the server to decode. If an input has no datatype, such as a graph's, its values determine the datatype. Files
    that are neither arrays nor JSON are then sent as bytes, and so is an argument that is not a file. If the service
    has no named inputs, the arguments name them.

    Raises:
        InvalidRequest: a file does not have the format of its suffix, or does not fit the input.
        OSError: a file cannot be read.
    """
    found: dict[str, Any] = {}
    piped = ""
    for argument in arguments:
        name, file = _split(argument, expected)
        if file == _STANDARD_INPUT:
            if piped:
                raise InvalidRequest(f"{argument}: standard input was read for {piped} and can be read only once")
            piped = argument
        more = _read(name, file, expected, images, report)
        twice = sorted(set(more) & set(found))
        if twice:
            raise InvalidRequest(f"{file}: duplicate inputs: {', '.join(twice)}")
        found |= more
    if not expected:
        return {name: _of_service(value, _untyped(name)) for name, value in found.items()}
    known = {tensor.name: tensor for tensor in expected}
    strangers = sorted(set(found) - set(known))
    missing = sorted(set(known) - set(found))
    if strangers or missing:
        what = "; ".join(
            f"{how}: {', '.join(names)}" for how, names in (("unknown", strangers), ("missing", missing)) if names
        )
        raise InvalidRequest(f"inputs do not match ({what}); the model takes {', '.join(known)}")
    return _fit_all(found, known, report)


def _of_service(value: Any, tensor: TensorInfo) -> Array:
    """Convert a value for a service without named inputs, where a text is one element."""
    made = value if isinstance(value, bytes) else to_own_type(value, tensor)
    return bytes_array([made], (1,)) if isinstance(made, bytes) else made


def is_typed(tensor: TensorInfo) -> bool:
    """Return whether the metadata has the datatype of a tensor."""
    return tensor.datatype in BY_NAME


def _untyped(name: str) -> TensorInfo:
    from ovmstrio.client.api import TensorInfo

    return TensorInfo(name, "", ())


def _fit_all(found: dict[str, Any], known: dict[str, TensorInfo], report: Callable[[str], None]) -> dict[str, Any]:
    """Convert all values and report all errors together; bytes are sent unchanged for any datatype."""
    inputs: dict[str, Any] = {}
    refusals = []
    for name, value in found.items():
        tensor = known[name]
        try:
            if isinstance(value, bytes):
                inputs[name] = bytes_array([value], (1,)) if is_typed(tensor) else value
            else:
                inputs[name] = fit(value, tensor, report) if is_typed(tensor) else to_own_type(value, tensor)
        except InvalidRequest as error:
            refusals.append(error.message)
    if refusals:
        raise InvalidRequest("\n".join(refusals))
    return inputs


def _split(argument: str, expected: Sequence[TensorInfo]) -> tuple[str, str]:
    """Split ``name=file``; the name of the only input may be omitted."""
    name, equals, file = argument.partition("=")
    if is_inline_json(argument):
        return "", argument
    if equals and (name in {tensor.name for tensor in expected} or (name and not expected)):
        return name, file
    # A text such as "What is 2 + 2 = 4?" has no name of an input before its sign.
    is_text = not name.isidentifier() and _text_instead("", argument, expected) is not None
    if equals and not is_text and not _is_file(argument):
        names = ", ".join(tensor.name for tensor in expected)
        raise InvalidRequest(f'unknown input "{name}"; the model takes {names}')
    return "", argument


def is_inline_json(text: str, *, is_scalar_taken: bool = False) -> bool:
    """Return whether an argument is no file but JSON: a list or an object, and any value if scalars are taken."""
    if _is_file(text) or not (is_scalar_taken or text.lstrip()[:1] in {"[", "{"}):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_file(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        # The name is too long or contains a null character.
        return False


def _only(expected: Sequence[TensorInfo], file: str) -> TensorInfo:
    if not expected:
        raise InvalidRequest(f"{file}: the service has no named inputs; name it: --input NAME={file}")
    if len(expected) != 1:
        names = ", ".join(f"--input {tensor.name}=..." for tensor in expected)
        raise InvalidRequest(f"{file}: the model has {len(expected)} inputs; name one: {names}")
    return expected[0]


def _read(
    name: str, file: str, expected: Sequence[TensorInfo], images: ImageOptions, report: Callable[[str], None]
) -> dict[str, Any]:
    """Read one file or text, which contains one input, or several if it is .npz or JSON."""
    tensor = _named(name, expected) or (expected[0] if len(expected) == 1 else None)
    takes_values = tensor is not None and is_typed(tensor)
    is_meant_as_json = takes_values and file[:1] in {"[", "{"} and not _is_file(file)
    if is_meant_as_json or is_inline_json(file, is_scalar_taken=takes_values):
        return _values(name, file.encode(), cut(file, 40), expected)
    if file != _STANDARD_INPUT and not _is_file(file) and (texted := _text_instead(name, file, expected)) is not None:
        report(f"input {texted.name}: no such file; sent as text")
        return {texted.name: os.fsencode(file)}
    content = sys.stdin.buffer.read() if file == _STANDARD_INPUT else Path(file).read_bytes()
    suffix = Path(file).suffix.lower() if file != _STANDARD_INPUT else sniff(content)
    if suffix == ".npz":
        arrays = load_numpy(content, file)
        return choose(name, arrays, file) if name else arrays
    if suffix == ".json":
        return _values(name, content, file, expected)
    tensor = tensor or _only(expected, file)
    return {tensor.name: _value(content, suffix, file, tensor, images)}


def _values(name: str, content: bytes, source: str, expected: Sequence[TensorInfo]) -> dict[str, Any]:
    """Read JSON: the value of one input, or an object of values by name."""
    values = read_json(content, source)
    if not isinstance(values, dict):
        return {name or _only(expected, source).name: values}
    return choose(name, values, source) if name else values


def _value(content: bytes, suffix: str, file: str, tensor: TensorInfo, images: ImageOptions) -> Array | bytes:
    """Read a file with one value."""
    if suffix == ".npy":
        return next(iter(load_numpy(content, file).values()))
    if images.encoded or not is_typed(tensor):
        return content
    if suffix == WAVE and tensor.datatype != BYTES.name:
        return decode_wave(content, file, tensor)
    if is_image(suffix) and tensor.datatype != BYTES.name:
        return decode_image(content, file, tensor, images)
    return read_packed(content, file, tensor)


def _named(name: str, expected: Sequence[TensorInfo]) -> TensorInfo | None:
    """Return the input with a name; a service without named inputs takes any."""
    if name and not expected:
        return _untyped(name)
    return next((each for each in expected if each.name == name), None)


def _text_instead(name: str, file: str, expected: Sequence[TensorInfo]) -> TensorInfo | None:
    """Return the input that takes the argument as text; None if it takes numbers, or the text looks like a file."""
    tensor = _named(name, expected) or (expected[0] if len(expected) == 1 else None)
    is_text = tensor is not None and (not is_typed(tensor) or tensor.datatype == BYTES.name)
    return tensor if is_text and Path(file).suffix.lower() not in _READ_SUFFIXES else None


def fit(value: Any, tensor: TensorInfo, report: Callable[[str], None]) -> Array:
    """Convert a value to an input's datatype and rank.

    Raises:
        InvalidRequest: values would change, or the shape does not fit the input.
    """
    array = to_type(value, tensor, report)
    if array.ndim == len(tensor.shape) - 1 and tensor.shape[0] in {1, -1}:
        report(f"input {tensor.name}: added a batch axis, {list(array.shape)} -> {[1, *array.shape]}")
        array = array[None]
    fits = array.ndim == len(tensor.shape) and all(
        wanted in {-1, size} for wanted, size in zip(tensor.shape, array.shape, strict=True)
    )
    if not fits:
        raise InvalidRequest(
            f'input "{tensor.name}": expected {tensor.datatype} {list(tensor.shape)}, got {list(array.shape)}'
        )
    return array
