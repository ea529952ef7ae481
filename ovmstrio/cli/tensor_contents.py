"""Parsers of file contents: numpy arrays, JSON, packed elements."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.cli.tensor_sounds import is_wave
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import BY_NAME, BYTES
from ovmstrio.encoding.raw_contents import bytes_array, from_raw

if TYPE_CHECKING:
    from ovmstrio.client import TensorInfo
    from ovmstrio.core.tensor import Array

WAVE: Final = ".wav"
_NPY_MAGIC: Final = b"\x93NUMPY"
_ZIP_MAGIC: Final = b"PK"


def sniff(content: bytes) -> str:
    """Return the file suffix of the content's format; empty if unknown."""
    if content.startswith(_NPY_MAGIC):
        return ".npy"
    if content.startswith(_ZIP_MAGIC):
        return ".npz"
    if is_wave(content):
        return WAVE
    return ".json" if content.lstrip()[:1] in {b"{", b"["} else ""


def load_numpy(content: bytes, file: str) -> dict[str, Array]:
    """Read the arrays of an .npz file, or the array of an .npy file under an empty name.

    Raises:
        InvalidRequest: the content has neither format.
    """
    if not content.startswith((_NPY_MAGIC, _ZIP_MAGIC)):
        raise InvalidRequest(f"{file}: not a file of numpy arrays: its first bytes are neither .npy nor .npz")
    try:
        loaded: Any = np.load(io.BytesIO(content), allow_pickle=False)
        return dict(loaded.items()) if isinstance(loaded, np.lib.npyio.NpzFile) else {"": loaded}
    except Exception as error:  # noqa: BLE001 - damaged files make numpy's readers raise nearly anything
        raise InvalidRequest(f"{file}: not a file of numpy arrays: {error}") from None


def choose(name: str, values: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the value of a name in a file of several values; a single value may have any name."""
    if name not in values and len(values) != 1:
        raise InvalidRequest(f'{file}: expected "{name}", got {", ".join(values) or "nothing"}')
    return {name: values[name] if name in values else next(iter(values.values()))}


def read_json(content: bytes, file: str) -> Any:
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


_PACKED: Final = "; files other than arrays, images and JSON are read as packed elements"


def read_packed(content: bytes, file: str, tensor: TensorInfo) -> Array:
    """Parse bytes as one element of a BYTES input, or as packed little-endian elements."""
    if tensor.datatype == BYTES.name:
        return bytes_array([content], (1,))
    if len(content) % BY_NAME[tensor.datatype].itemsize:
        raise InvalidRequest(f"{file}: {len(content)} bytes are not a multiple of {tensor.datatype} elements{_PACKED}")
    array = from_raw(content, tensor.datatype, (-1,))
    shape = _complete(tensor.shape, array.size)
    if shape is None:
        wanted = f"{tensor.datatype} {list(tensor.shape)}"
        raise InvalidRequest(f"{file}: expected the bytes of {wanted}, got {array.size} elements{_PACKED}")
    return array.reshape(shape)


def _complete(shape: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """Set the dynamic dimensions of a shape so that it has ``size`` elements: 1 for all but the last of them."""
    known = int(np.prod([dim for dim in shape if dim >= 0]))
    if -1 not in shape:
        return shape if known == size else None
    if known == 0 or size % known:
        return None
    last = len(shape) - 1 - shape[::-1].index(-1)
    return tuple(size // known if position == last else 1 if dim == -1 else dim for position, dim in enumerate(shape))
