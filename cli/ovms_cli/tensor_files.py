"""Files of every kind as the tensors that a model takes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovms_cli.tensor_images import ImageOptions, decode_image, is_image
from ovms_cli.tensor_sounds import decode_wave, is_wave
from ovms_cli.tensor_types import to_type
from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.protocol.wire_tensors import bytes_array, from_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.client import TensorInfo
    from ovmstrio.core.tensor import Array

__all__ = ["fit", "load_numpy", "read_inputs"]

_NPY_MAGIC: Final = b"\x93NUMPY"
_ZIP_MAGIC: Final = b"PK"
_AS_DECODED: Final = ImageOptions()
_STANDARD_INPUT: Final = "-"
_WAVE: Final = ".wav"


def read_inputs(
    arguments: Sequence[str],
    expected: Sequence[TensorInfo],
    note: Callable[[str], None],
    images: ImageOptions = _AS_DECODED,
) -> dict[str, Array]:
    """Read ``file`` or ``name=file`` arguments into the inputs of a model.

    ``note`` is told what was changed to make a value fit.  With ``images.encoded``, files that hold no arrays are
    given as ``BYTES`` of one element, for the server to decode.

    Raises:
        InvalidRequest: a file is not what its kind should be, or does not fit the input.
        OSError: a file cannot be read.
    """
    known = {tensor.name: tensor for tensor in expected}
    unnamed = sorted(tensor.name for tensor in expected if tensor.datatype not in BY_NAME)
    if unnamed:
        raise InvalidRequest(f"inputs of a type that KServe has no name for: {', '.join(unnamed)}")
    found: dict[str, Any] = {}
    piped = ""
    for argument in arguments:
        name, file = _split(argument, expected)
        if file == _STANDARD_INPUT:
            if piped:
                raise InvalidRequest(f"{argument}: standard input was read for {piped}, and can be read but once")
            piped = argument
        more = _read(name, file, expected, images)
        twice = sorted(set(more) & set(found))
        if twice:
            raise InvalidRequest(f"{file}: given twice: {', '.join(twice)}")
        found |= more
    strangers = sorted(set(found) - set(known))
    missing = sorted(set(known) - set(found))
    if strangers or missing:
        what = "; ".join(
            f"{how}: {', '.join(names)}" for how, names in (("unknown", strangers), ("missing", missing)) if names
        )
        raise InvalidRequest(f"inputs do not match ({what}); the model takes {', '.join(known)}")
    return _fit_all(found, known, note)


def _fit_all(found: dict[str, Any], known: dict[str, TensorInfo], note: Callable[[str], None]) -> dict[str, Array]:
    """Fit every value, and tell of all that do not fit at once; bytes go as they are, whatever the input's type."""
    inputs, refusals = {}, []
    for name, value in found.items():
        try:
            is_encoded = isinstance(value, bytes)
            inputs[name] = bytes_array([value], (1,)) if is_encoded else fit(value, known[name], note)
        except InvalidRequest as error:
            refusals.append(error.message)
    if refusals:
        raise InvalidRequest("\n".join(refusals))
    return inputs


def _split(argument: str, expected: Sequence[TensorInfo]) -> tuple[str, str]:
    """Take ``name=file`` apart; the name of the only input may be left out."""
    name, equals, file = argument.partition("=")
    if equals and name in {tensor.name for tensor in expected}:
        return name, file
    if equals and not Path(argument).exists():
        names = ", ".join(tensor.name for tensor in expected)
        raise InvalidRequest(f'no input is called "{name}"; the model takes {names}')
    return "", argument


def _only(expected: Sequence[TensorInfo], file: str) -> TensorInfo:
    if len(expected) != 1:
        names = ", ".join(f"--input {tensor.name}=..." for tensor in expected)
        raise InvalidRequest(f"{file}: the model has {len(expected)} inputs; say which this is: {names}")
    return expected[0]


def _read(name: str, file: str, expected: Sequence[TensorInfo], images: ImageOptions) -> dict[str, Any]:
    """Read one file, which may hold one input or, as .npz and JSON can, several."""
    content = sys.stdin.buffer.read() if file == _STANDARD_INPUT else Path(file).read_bytes()
    suffix = Path(file).suffix.lower() if file != _STANDARD_INPUT else _sniff(content)
    if suffix == ".npz":
        arrays = load_numpy(content, file)
        return _choose(name, arrays, file) if name else arrays
    if suffix == ".json":
        values = _read_json(content, file)
        if not isinstance(values, dict):
            return {name or _only(expected, file).name: values}
        return _choose(name, values, file) if name else values
    tensor = next((each for each in expected if each.name == name), None) or _only(expected, file)
    if suffix == ".npy":
        return {tensor.name: next(iter(load_numpy(content, file).values()))}
    if images.encoded:
        return {tensor.name: content}
    if suffix == _WAVE and tensor.datatype != BYTES.name:
        return {tensor.name: decode_wave(content, file, tensor)}
    if is_image(suffix) and tensor.datatype != BYTES.name:
        return {tensor.name: decode_image(content, file, tensor, images)}
    return {tensor.name: _raw(content, file, tensor)}


def _sniff(content: bytes) -> str:
    if content.startswith(_NPY_MAGIC):
        return ".npy"
    if content.startswith(_ZIP_MAGIC):
        return ".npz"
    if is_wave(content):
        return _WAVE
    return ".json" if content.lstrip()[:1] in {b"{", b"["} else ""


def load_numpy(content: bytes, file: str) -> dict[str, Array]:
    """Read the arrays of an .npz file, or the one of an .npy file under an empty name.

    Raises:
        InvalidRequest: the content is neither.
    """
    if not content.startswith((_NPY_MAGIC, _ZIP_MAGIC)):
        raise InvalidRequest(f"{file}: not a file of numpy arrays: it begins as neither .npy nor .npz does")
    try:
        loaded: Any = np.load(io.BytesIO(content), allow_pickle=False)
        return dict(loaded.items()) if isinstance(loaded, np.lib.npyio.NpzFile) else {"": loaded}
    except Exception as error:  # noqa: BLE001 - damaged files make numpy's readers raise nearly anything
        raise InvalidRequest(f"{file}: not a file of numpy arrays: {error}") from None


def _choose(name: str, values: dict[str, Any], file: str) -> dict[str, Any]:
    """Take the value of one name out of a file of several; a file of one may call it otherwise."""
    if name not in values and len(values) != 1:
        raise InvalidRequest(f'{file}: has no "{name}", but {", ".join(values) or "nothing"}')
    return {name: values[name] if name in values else next(iter(values.values()))}


def _read_json(content: bytes, file: str) -> Any:
    """Read a KServe body or an object of nested lists, both by input name, or a nested list."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file}: not JSON: {error}") from None
    if isinstance(value, dict) and isinstance(value.get("inputs"), list):
        try:
            return {each["name"]: np.array(each["data"], object).reshape(each["shape"]) for each in value["inputs"]}
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{file}: not a KServe body with data for each input: {error!r}") from None
    return value


def _raw(content: bytes, file: str, tensor: TensorInfo) -> Array:
    """Take bytes as one element of a BYTES input, or as packed little-endian elements."""
    if tensor.datatype == BYTES.name:
        return bytes_array([content], (1,))
    if len(content) % BY_NAME[tensor.datatype].itemsize:
        raise InvalidRequest(f"{file}: {len(content)} bytes are no whole number of {tensor.datatype} elements")
    array = from_raw(content, tensor.datatype, (-1,))
    shape = _complete(tensor.shape, array.size)
    if shape is None:
        wanted = f"{tensor.datatype} {list(tensor.shape)}"
        raise InvalidRequest(f"{file}: expected the bytes of {wanted}, got {array.size} elements")
    return array.reshape(shape)


def _complete(shape: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """Fill the open dimensions of a shape so that it has ``size`` elements: 1 for all but the last open one."""
    known = int(np.prod([dim for dim in shape if dim >= 0]))
    if -1 not in shape:
        return shape if known == size else None
    if known == 0 or size % known:
        return None
    last = len(shape) - 1 - shape[::-1].index(-1)
    return tuple(size // known if position == last else 1 if dim == -1 else dim for position, dim in enumerate(shape))


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
