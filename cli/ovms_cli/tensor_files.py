"""Files of every kind as the tensors that a model takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovms_cli.tensor_contents import WAVE, choose, load_numpy, read_json, read_packed, sniff
from ovms_cli.tensor_images import ImageOptions, decode_image, is_image
from ovms_cli.tensor_sounds import decode_wave
from ovms_cli.tensor_types import to_own_type, to_type
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import BY_NAME, BYTES
from ovmstrio.encoding.wire_tensors import bytes_array

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
    note: Callable[[str], None],
    images: ImageOptions = _AS_DECODED,
) -> dict[str, Any]:
    """Read ``file`` or ``name=file`` arguments into the inputs of a model: arrays, or bytes.

    ``note`` is told what was changed to make a value fit.  With ``images.encoded``, files that hold no arrays are
    given as ``BYTES`` of one element, for the server to decode.  Where an input has no type, as a graph's, its values
    say it, and what is neither an array nor JSON goes as bytes, as does a text that is no file; where a service names
    no inputs, the arguments do.

    Raises:
        InvalidRequest: a file is not what its kind should be, or does not fit the input.
        OSError: a file cannot be read.
    """
    found: dict[str, Any] = {}
    piped = ""
    for argument in arguments:
        name, file = _split(argument, expected)
        if file == _STANDARD_INPUT:
            if piped:
                raise InvalidRequest(f"{argument}: standard input was read for {piped}, and can be read but once")
            piped = argument
        more = _read(name, file, expected, images, note)
        twice = sorted(set(more) & set(found))
        if twice:
            raise InvalidRequest(f"{file}: given twice: {', '.join(twice)}")
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
    return _fit_all(found, known, note)


def _of_service(value: Any, tensor: TensorInfo) -> Array:
    """Give the value of a service that names no inputs, to which a text is one element."""
    made = value if isinstance(value, bytes) else to_own_type(value, tensor)
    return bytes_array([made], (1,)) if isinstance(made, bytes) else made


def is_typed(tensor: TensorInfo) -> bool:
    """Tell whether metadata says of which type a tensor is."""
    return tensor.datatype in BY_NAME


def _untyped(name: str) -> TensorInfo:
    from ovmstrio.client.api import TensorInfo

    return TensorInfo(name, "", ())


def _fit_all(found: dict[str, Any], known: dict[str, TensorInfo], note: Callable[[str], None]) -> dict[str, Any]:
    """Fit every value, and tell of all that do not fit at once; bytes go as they are, whatever the input's type."""
    inputs: dict[str, Any] = {}
    refusals = []
    for name, value in found.items():
        tensor = known[name]
        try:
            if isinstance(value, bytes):
                inputs[name] = bytes_array([value], (1,)) if is_typed(tensor) else value
            else:
                inputs[name] = fit(value, tensor, note) if is_typed(tensor) else to_own_type(value, tensor)
        except InvalidRequest as error:
            refusals.append(error.message)
    if refusals:
        raise InvalidRequest("\n".join(refusals))
    return inputs


def _split(argument: str, expected: Sequence[TensorInfo]) -> tuple[str, str]:
    """Take ``name=file`` apart; the name of the only input may be left out."""
    name, equals, file = argument.partition("=")
    if equals and (name in {tensor.name for tensor in expected} or (name and not expected)):
        return name, file
    if equals and not _is_file(argument):
        names = ", ".join(tensor.name for tensor in expected)
        raise InvalidRequest(f'no input is called "{name}"; the model takes {names}')
    return "", argument


def _is_file(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        # Too long for a name, or with a zero in it.
        return False


def _only(expected: Sequence[TensorInfo], file: str) -> TensorInfo:
    if not expected:
        raise InvalidRequest(f"{file}: the service names no inputs; say which this is: --input NAME={file}")
    if len(expected) != 1:
        names = ", ".join(f"--input {tensor.name}=..." for tensor in expected)
        raise InvalidRequest(f"{file}: the model has {len(expected)} inputs; say which this is: {names}")
    return expected[0]


def _read(
    name: str, file: str, expected: Sequence[TensorInfo], images: ImageOptions, note: Callable[[str], None]
) -> dict[str, Any]:
    """Read one file, which may hold one input or, as .npz and JSON can, several."""
    if file != _STANDARD_INPUT and not _is_file(file) and (texted := _text_instead(name, file, expected)) is not None:
        note(f"input {texted.name}: no file is called so; sent as text")
        return {texted.name: os.fsencode(file)}
    content = sys.stdin.buffer.read() if file == _STANDARD_INPUT else Path(file).read_bytes()
    suffix = Path(file).suffix.lower() if file != _STANDARD_INPUT else sniff(content)
    if suffix == ".npz":
        arrays = load_numpy(content, file)
        return choose(name, arrays, file) if name else arrays
    if suffix == ".json":
        values = read_json(content, file)
        if not isinstance(values, dict):
            return {name or _only(expected, file).name: values}
        return choose(name, values, file) if name else values
    tensor = _named(name, expected) or _only(expected, file)
    return {tensor.name: _value(content, suffix, file, tensor, images)}


def _value(content: bytes, suffix: str, file: str, tensor: TensorInfo, images: ImageOptions) -> Array | bytes:
    """Read a file that holds one value."""
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
    """Give the input of a name; a service that names no inputs takes any."""
    if name and not expected:
        return _untyped(name)
    return next((each for each in expected if each.name == name), None)


def _text_instead(name: str, file: str, expected: Sequence[TensorInfo]) -> TensorInfo | None:
    """Give the input that takes what is no file as a text; None where it has a type, or the text looks like a file."""
    tensor = _named(name, expected) or (expected[0] if len(expected) == 1 else None)
    is_taken = tensor is not None and not is_typed(tensor) and Path(file).suffix.lower() not in _READ_SUFFIXES
    return tensor if is_taken else None


def fit(value: Any, tensor: TensorInfo, note: Callable[[str], None]) -> Array:
    """Bring a value to an input's element type and rank.

    Raises:
        InvalidRequest: values would change, or the shape cannot be the input's.
    """
    array = to_type(value, tensor, note)
    if array.ndim == len(tensor.shape) - 1 and tensor.shape[0] in {1, -1}:
        note(f"input {tensor.name}: added a batch axis, {list(array.shape)} -> {[1, *array.shape]}")
        array = array[None]
    fits = array.ndim == len(tensor.shape) and all(
        wanted in {-1, size} for wanted, size in zip(tensor.shape, array.shape, strict=True)
    )
    if not fits:
        raise InvalidRequest(
            f'input "{tensor.name}": expected {tensor.datatype} {list(tensor.shape)}, got {list(array.shape)}'
        )
    return array
