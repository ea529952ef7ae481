"""What a handler's constructor gets as ``model_client``."""

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
from ovmstrio.handlers.models.model_cache import Shelf
from ovmstrio.handlers.models.version_index import LATEST, is_version

__all__ = ["Array", "ModelClient", "ModelNames", "flat_list", "read_inputs", "version_text"]

# ----------------------------------------------------------------------
# What a handler's constructor gets as ``model_client``
# ----------------------------------------------------------------------

_SHOWN: Final = 20


def version_text(version: str | int | None) -> str:
    """Read the version that somebody asks for: a number, or nothing or ``latest`` for the highest one.

    Raises:
        UserRuntimeException: it is neither.
    """
    if version is None or version in {LATEST, ""}:
        return LATEST
    text = str(version)
    if isinstance(version, bool) or not is_version(text):
        raise UserRuntimeException(f"model version {version!r} is invalid", "expected a number, or 'latest'")
    return text


class ModelNames:
    """Which names may be asked for.

    Args:
        spec: how the project names its models, and which it lists itself.
        shelf: knows the others.
    """

    def __init__(self, spec: ModelsSpec, shelf: Shelf) -> None:
        self._has_one = spec.kind == "path"
        self._listed = frozenset(entry.name for entry in spec.entries)
        self._shelf = shelf

    @property
    def known(self) -> list[str]:
        """The names that there are, sorted."""
        return sorted(self._listed or {key.name for key in self._shelf.catalog})

    def check(self, name: str | None) -> str:
        """Give the name of the model that is meant.

        Raises:
            UserRuntimeException: none is given where there are many, or there is no such model.
        """
        if self._has_one:
            return DEFAULT_MODEL
        if name is not None and (name in self._listed or self._shelf.versions(name)):
            return name
        known = self.known
        listing = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
        what = "model_name was not specified" if name is None else f"model {name!r} was not found"
        raise UserRuntimeException(what, f"choose one of the following: {listing}")


class ModelClient(ModelClientBase):
    """Gives models to the handler's code, from any of its threads, in its constructor too.

    A model that is given stays as it is, its files too, until the call of the handler ends in which it was asked for.

    Args:
        shelf: what is here.
        loader: gives that, and loads what is not.
        names: the names that may be asked for.
        is_caching: whether models come and go by their use.
    """

    def __init__(
        self,
        shelf: Shelf,
        loader: ModelLoader,
        names: ModelNames,
        *,
        is_caching: bool,
    ) -> None:
        self._shelf = shelf
        self._loader = loader
        self._names = names
        self._is_caching = is_caching

    def get_model(self, model_name: str | None = None, model_version: str | int | None = LATEST) -> Any:
        """Give what ``load_model`` returned for a version of a model, loading it if need be.

        Args:
            model_name: of the model; not needed, and not looked at, where there is one only by its ``path``.
            model_version: a number, or the highest one for ``"latest"``, None and nothing.

        Raises:
            UserRuntimeException: there is no such model or version, or it cannot be loaded.
        """
        version = LATEST if model_version is None or model_version == LATEST else version_text(model_version)
        name = self._names.check(model_name)
        return self._loader.get(name, version).value

    async def aget_model(self, model_name: str | None = None, model_version: str | int | None = LATEST) -> Any:
        """Give a model as :meth:`get_model` does, for handlers whose methods are ``async def``.

        Raises:
            UserRuntimeException: as there.

        Cancellation: at once; what is being loaded is loaded all the same.
        """
        await trio.lowlevel.checkpoint()
        version, name = version_text(model_version), self._names.check(model_name)
        return (await self._loader.aget(name, version)).value

    def set_load_method(self, load_model: LoadModel) -> None:
        """Say how models are loaded from their folders."""
        self._loader.load_model = load_model

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The models by name, each with its ``versions``, the highest first, and their ``timestamps``."""
        return self._shelf.metadata()

    @property
    def caching(self) -> bool:
        """Whether models come and go by their use."""
        return self._is_caching


# ----------------------------------------------------------------------
# Arrays out of what handlers give to a model, and what they get back for its outputs
# ----------------------------------------------------------------------

Array = np.ndarray[Any, Any]

_SPECIAL: Final = {math.inf: "Infinity", -math.inf: "-Infinity"}


def read_inputs(given: Any, inputs: Sequence[TensorSpec], model: str, unused: Collection[str] = ()) -> dict[str, Array]:
    """Make an array of each input of a model, in the order of the inputs.

    Args:
        given: what the handler gave, by name.
        inputs: what the model takes.
        model: what to call it in messages.
        unused: inputs that it has by name only, whose values do not matter.

    Raises:
        UserRuntimeException: something is missing, or does not fit.
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
        raise _misfit(spec, model, str(error)) from error
    sizes = array.shape
    fits = len(sizes) == len(spec.shape) and all(dim.accepts(size) for dim, size in zip(spec.shape, sizes, strict=True))
    if not fits:
        raise _misfit(spec, model, f"the shape is {_shown(sizes)}")
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


def _misfit(spec: TensorSpec, model: str, reason: str) -> UserRuntimeException:
    shape = "a scalar" if not spec.shape else f"shape {_shown(spec.reported_shape)}"
    return UserRuntimeException(
        f"input {spec.name!r} of {model} does not fit", f"expected {shape} of {spec.datatype.name}", reason
    )


def _shown(sizes: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"


def flat_list(tensor: Tensor) -> list[Any]:
    """Give the elements of an output as the JSON of a protobuf message has them, without their shape.

    Integers of 64 bits are strings, strings are base64, and halves are their bits.
    """
    name = tensor.datatype.name
    convert = _TO_LIST.get(name)
    flat = tensor.array.reshape(-1)
    return flat.tolist() if convert is None else convert(flat)


def _digits(array: Array) -> list[Any]:
    return list(map(str, array.tolist()))


def _base64(array: Array) -> list[Any]:
    return [base64.b64encode(value).decode() for value in array]


def _bits(array: Array) -> list[Any]:
    return list(array.view(np.uint16).tolist())


def _doubles(array: Array) -> list[Any]:
    values: list[Any] = array.tolist()
    return values if np.isfinite(array).all() else [_named(value) for value in values]


def _floats(array: Array) -> list[Any]:
    """Give the shortest numbers that are these floats, as 0.1 instead of 0.10000000149011612."""
    return _doubles(array.astype("U").astype(np.float64))


def _named(value: float) -> float | str:
    return "NaN" if math.isnan(value) else _SPECIAL.get(value, value)


_TO_LIST: Final[Mapping[str, Callable[[Array], list[Any]]]] = {
    "INT64": _digits,
    "UINT64": _digits,
    "BYTES": _base64,
    "FP16": _bits,
    "BF16": _bits,
    "FP32": _floats,
    "FP64": _doubles,
}
