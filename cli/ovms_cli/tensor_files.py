"""Files of every kind as the tensors that a model takes."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.datatypes import BY_NAME, BYTES
from ovmstrio.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.client import TensorInfo

__all__ = ["Array", "fit", "read_inputs"]

Array = np.ndarray[Any, Any]

_IMAGES: Final = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"})
_NPY_MAGIC: Final = b"\x93NUMPY"
_CHANNELS: Final = (1, 3)
_IMAGE_RANK: Final = 4


def read_inputs(
    arguments: Sequence[str], expected: Sequence[TensorInfo], note: Callable[[str], None]
) -> dict[str, Array]:
    """Read ``file`` or ``name=file`` arguments into the inputs of a model.

    ``note`` is told what was changed to make a value fit.

    Raises:
        InvalidRequest: a file is not what its kind should be, or does not fit the input.
        OSError: a file cannot be read.
    """
    found: dict[str, Any] = {}
    for argument in arguments:
        name, file = _split(argument, expected)
        found |= _read(name, file, expected)
    known = {tensor.name: tensor for tensor in expected}
    strangers = sorted(set(found) - set(known))
    missing = sorted(set(known) - set(found))
    if strangers or missing:
        what = [f"unknown: {', '.join(strangers)}"] * bool(strangers) + [f"missing: {', '.join(missing)}"] * bool(
            missing
        )
        raise InvalidRequest(f"inputs do not match ({'; '.join(what)}); the model takes {', '.join(known)}")
    return {name: fit(value, known[name], note) for name, value in found.items()}


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


def _read(name: str, file: str, expected: Sequence[TensorInfo]) -> dict[str, Any]:
    """Read one file, which may hold one input or, as .npz and JSON can, several."""
    content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    suffix = Path(file).suffix.lower() if file != "-" else _sniff(content)
    if suffix == ".npz":
        arrays = _load_numpy(content, file)
        return {name: next(iter(arrays.values()))} if name and arrays else arrays
    if suffix == ".json":
        return _read_json(name, content, file, expected)
    tensor = next((each for each in expected if each.name == name), None) or _only(expected, file)
    if suffix == ".npy":
        return {tensor.name: next(iter(_load_numpy(content, file).values()))}
    if suffix in _IMAGES and tensor.datatype != BYTES.name:
        return {tensor.name: _image(content, file, tensor)}
    return {tensor.name: _raw(content, file, tensor)}


def _sniff(content: bytes) -> str:
    if content.startswith(_NPY_MAGIC):
        return ".npy"
    if content.startswith(b"PK\x03\x04"):
        return ".npz"
    return ".json" if content.lstrip()[:1] in {b"{", b"["} else ""


def _load_numpy(content: bytes, file: str) -> dict[str, Array]:
    """Read the arrays of an .npz file, or the one of an .npy file under an empty name."""
    try:
        loaded: Any = np.load(io.BytesIO(content), allow_pickle=False)
        return dict(loaded.items()) if isinstance(loaded, np.lib.npyio.NpzFile) else {"": loaded}
    except (ValueError, EOFError, OSError, LookupError, zipfile.BadZipFile) as error:
        raise InvalidRequest(f"{file}: not a file of numpy arrays: {error}") from None


def _read_json(name: str, content: bytes, file: str, expected: Sequence[TensorInfo]) -> dict[str, Any]:
    """Read a KServe body, an object of nested lists by input name, or a nested list for one input."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise InvalidRequest(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        return {name or _only(expected, file).name: value}
    if isinstance(value.get("inputs"), list):
        try:
            return {each["name"]: np.array(each["data"], object).reshape(each["shape"]) for each in value["inputs"]}
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{file}: not a KServe body with data for each input: {error!r}") from None
    return value


def _raw(content: bytes, file: str, tensor: TensorInfo) -> Array:
    """Take bytes as one element of a BYTES input, or as packed little-endian elements."""
    if tensor.datatype == BYTES.name:
        array = np.empty(1, object)
        array[0] = content
        return array
    dtype = BY_NAME[tensor.datatype].numpy
    if len(content) % dtype.itemsize:
        raise InvalidRequest(f"{file}: {len(content)} bytes are no whole number of {tensor.datatype} elements")
    array = np.frombuffer(content, dtype)
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


def _image(content: bytes, file: str, tensor: TensorInfo) -> Array:
    """Decode an image to the layout and size of a rank-4 input, RGB, values 0 to 255."""
    from PIL import Image, UnidentifiedImageError

    if len(tensor.shape) != _IMAGE_RANK or not {tensor.shape[1], tensor.shape[3]} & set(_CHANNELS):
        raise InvalidRequest(f"{file}: input {tensor.name} {list(tensor.shape)} does not look like an image")
    first = tensor.shape[1] in _CHANNELS
    channels, height, width = (tensor.shape[i] for i in ((1, 2, 3) if first else (3, 1, 2)))
    try:
        image = Image.open(io.BytesIO(content)).convert("L" if channels == 1 else "RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise InvalidRequest(f"{file}: not an image that can be decoded: {error}") from None
    size = (width if width > 0 else image.width, height if height > 0 else image.height)
    array = np.asarray(image.resize(size)).reshape(size[1], size[0], channels)[None]
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2) if first else array)


def fit(value: Any, tensor: TensorInfo, note: Callable[[str], None]) -> Array:
    """Bring a value to an input's element type and rank.

    Raises:
        InvalidRequest: values would change, or the shape cannot be the input's.
    """
    array = _to_type(value, tensor, note)
    if array.ndim == len(tensor.shape) - 1 and tensor.shape[0] in {1, -1}:
        note(f"input {tensor.name}: added a batch axis, {list(array.shape)} -> {[1, *array.shape]}")
        array = array[None]
    fits = array.ndim == len(tensor.shape) and all(
        wanted in {-1, size} for wanted, size in zip(tensor.shape, array.shape, strict=True)
    )
    if not fits:
        wanted = f"{tensor.datatype} {list(tensor.shape)}"
        raise InvalidRequest(f'input "{tensor.name}": expected {wanted}, got {list(array.shape)}')
    return array


def _to_type(value: Any, tensor: TensorInfo, note: Callable[[str], None]) -> Array:
    if tensor.datatype == BYTES.name:
        return np.array(value, object)
    wanted = np.dtype(np.float32) if tensor.datatype == "BF16" else BY_NAME[tensor.datatype].numpy
    try:
        array = np.array(value) if not isinstance(value, np.ndarray) else value
        with np.errstate(all="ignore"):
            converted = array.astype(wanted)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f'input "{tensor.name}": expected {tensor.datatype}: {error}') from None
    if array.dtype == wanted or array.dtype.hasobject:
        return converted
    if not _survived(array, converted):
        detail = f"expected {tensor.datatype}, got {array.dtype}, whose values do not survive conversion"
        raise InvalidRequest(f'input "{tensor.name}": {detail}')
    if isinstance(value, np.ndarray):
        note(f"input {tensor.name}: converted {array.dtype} to {tensor.datatype}")
    return converted


def _survived(array: Array, converted: Array) -> bool:
    """Tell whether values are the same after conversion, for floating-point types as nearly as the type can say."""
    if array.dtype.kind not in "buif":
        return False
    if converted.dtype.kind == "f":
        return bool(np.allclose(converted.astype(np.float64), array.astype(np.float64), rtol=1e-3, equal_nan=True))
    with np.errstate(all="ignore"):
        return bool(np.array_equal(converted.astype(array.dtype), array))
