"""Model client passed to handler constructors, and conversion of its inputs and outputs."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import trio

from cortex_internal.lib.client.python import ModelClient as ModelClientBase
from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.core.tensor import BYTES, Tensor, TensorSpec
from ovmstrio.handlers.config.project_spec import DEFAULT_MODEL, ModelsSpec
from ovmstrio.handlers.models.loader import LoadModel, ModelLoader
from ovmstrio.handlers.models.model_cache import ModelCache
from ovmstrio.handlers.models.version_index import LATEST, is_version

_SHOWN: Final = 20


def normalize_version(version: str | int | None) -> str:
    """Normalize a version to a number or ``latest`` (None and ``""`` too); UserRuntimeException for others."""
    if version is None or version in {LATEST, ""}:
        return LATEST
    text = str(version)
    if isinstance(version, bool) or not is_version(text):
        raise UserRuntimeException(f"model version {version!r} is invalid", "expected a number, or 'latest'")
    return text


class ModelNames:
    """Model names of a project that handlers may request."""

    def __init__(self, spec: ModelsSpec, cache: ModelCache) -> None:
        self._has_one = spec.kind == "path"
        self._listed = frozenset(entry.name for entry in spec.entries)
        self._cache = cache

    @property
    def known(self) -> list[str]:
        """Sorted model names."""
        return sorted(self._listed or {key.name for key in self._cache.catalog})

    def check(self, name: str | None) -> str:
        """Return the name of the requested model.

        Raises:
            UserRuntimeException: no name is given and the project has several models, or the model does not exist.
        """
        if self._has_one:
            return DEFAULT_MODEL
        if name is not None and (name in self._listed or self._cache.versions(name)):
            return name
        known = self.known
        listing = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
        what = "model_name was not specified" if name is None else f"model {name!r} was not found"
        raise UserRuntimeException(what, f"choose one of the following: {listing}")


class ModelClient(ModelClientBase):
    """Access to a project's models for the handler's code, from any thread and in its constructor.

    A returned model and its files stay unchanged until the current call of the handler ends.
    """

    def __init__(
        self,
        cache: ModelCache,
        loader: ModelLoader,
        names: ModelNames,
        *,
        is_caching: bool,
    ) -> None:
        self._cache = cache
        self._loader = loader
        self._names = names
        self._is_caching = is_caching

    def get_model(self, model_name: str | None = None, model_version: str | int | None = LATEST) -> Any:
        """Return the result of ``load_model`` for a version of a model; load it if necessary.

        Args:
            model_name: ignored if the project has one model given by its ``path``.
            model_version: a number; ``"latest"``, None or ``""`` for the highest version.

        Raises:
            UserRuntimeException: the model or version does not exist or fails to load.
        """
        version = LATEST if model_version is None or model_version == LATEST else normalize_version(model_version)
        name = self._names.check(model_name)
        return self._loader.get(name, version).value

    async def aget_model(self, model_name: str | None = None, model_version: str | int | None = LATEST) -> Any:
        """Return a model as :meth:`get_model` does, for ``async def`` handlers.

        Cancellation: at once; a started load continues.
        """
        await trio.lowlevel.checkpoint()
        version, name = normalize_version(model_version), self._names.check(model_name)
        return (await self._loader.get_async(name, version)).value

    def set_load_method(self, load_model: LoadModel) -> None:
        """Set the function that loads a model from its folder."""
        self._loader.load_model = load_model

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Models by name, each with ``versions`` (highest first) and ``timestamps``."""
        return self._cache.metadata()

    @property
    def caching(self) -> bool:
        """Whether models are loaded and evicted by use."""
        return self._is_caching


# Model inputs and outputs

Array = np.ndarray[Any, Any]

_SPECIAL: Final = {math.inf: "Infinity", -math.inf: "-Infinity"}


def to_input_arrays(
    given: Any, inputs: Sequence[TensorSpec], model: str, unused: Collection[str] = ()
) -> dict[str, Array]:
    """Convert the handler's values to the input arrays of a model, in the order of the inputs.

    ``model`` is the name in messages; the values of inputs in ``unused`` are ignored.

    Raises UserRuntimeException if an input is missing or has the wrong type, datatype or shape.
    """
    if not isinstance(given, Mapping):
        raise UserRuntimeException(
            f"the input of {model} must be a dict of arrays by input name, got a {type(given).__name__}"
        )
    names = [spec.name for spec in inputs]
    unknown = [str(name) for name in given if name not in names and name not in unused]
    if unknown:
        raise UserRuntimeException(f"{model} has no input {unknown[0]!r}", f"its inputs are {', '.join(names)}")
    arrays: dict[str, Array] = {}
    for spec in inputs:
        if spec.name not in given:
            raise UserRuntimeException(f"missing key {spec.name!r} for {model}")
        arrays[spec.name] = _array(given[spec.name], spec, model)
    return arrays


def _array(value: Any, spec: TensorSpec, model: str) -> Array:
    try:
        found = np.asarray(value, dtype=object) if spec.datatype is BYTES else np.asarray(value)
        array = _strings(found) if spec.datatype is BYTES else _converted(found, spec.datatype.numpy)
    except (TypeError, ValueError, OverflowError) as error:
        raise _mismatch(spec, model, str(error)) from error
    sizes = array.shape
    fits = len(sizes) == len(spec.shape) and all(dim.accepts(size) for dim, size in zip(spec.shape, sizes, strict=True))
    if not fits:
        raise _mismatch(spec, model, f"the shape is {_shown(sizes)}")
    return array


def _converted(array: Array, dtype: np.dtype[Any]) -> Array:
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise OverflowError(f"a value is out of the range of {dtype.name}")
    elif not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(f"the values are {array.dtype.name}")
    return np.ascontiguousarray(array, dtype).reshape(array.shape)


def _strings(array: Array) -> Array:
    encoded = np.empty(array.size, dtype=object)
    encoded[:] = [_encoded(value) for value in array.flat]
    return encoded.reshape(array.shape)


def _encoded(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    raise TypeError(f"a value is a {type(value).__name__}")


def _mismatch(spec: TensorSpec, model: str, reason: str) -> UserRuntimeException:
    shape = "a scalar" if not spec.shape else f"shape {_shown(spec.reported_shape)}"
    return UserRuntimeException(
        f"input {spec.name!r} of {model} does not fit", f"expected {shape} of {spec.datatype.name}", reason
    )


def _shown(sizes: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"


def to_flat_list(tensor: Tensor) -> list[Any]:
    """Return the elements of an output as a flat list, as JSON of a protobuf message has them.

    64-bit integers are decimal strings, BYTES are base64, and FP16 and BF16 are their bits.
    """
    name = tensor.datatype.name
    convert = _TO_LIST.get(name)
    flat = tensor.array.reshape(-1)
    return flat.tolist() if convert is None else convert(flat)


def _decimal_strings(array: Array) -> list[Any]:
    return list(map(str, array.tolist()))


def _bits(array: Array) -> list[Any]:
    return list(array.view(np.uint16).tolist())


def _doubles(array: Array) -> list[Any]:
    values: list[Any] = array.tolist()
    if np.isfinite(array).all():
        return values
    return ["NaN" if math.isnan(value) else _SPECIAL.get(value, value) for value in values]


def _floats(array: Array) -> list[Any]:
    """Return the shortest decimal numbers for these floats: 0.1, not 0.10000000149011612."""
    return _doubles(array.astype("U").astype(np.float64))


_TO_LIST: Final[Mapping[str, Callable[[Array], list[Any]]]] = {
    "INT64": _decimal_strings,
    "UINT64": _decimal_strings,
    "BYTES": lambda array: [base64.b64encode(value).decode() for value in array],
    "FP16": _bits,
    "BF16": _bits,
    "FP32": _floats,
    "FP64": _doubles,
}
