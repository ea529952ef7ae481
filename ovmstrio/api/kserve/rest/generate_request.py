"""The body of Triton's generate extension: a flat JSON object of names and values, read into an ``InferRequest``.

A key that is the name of an input is a tensor, wherever it stands: among the keys of the body or in its object
``parameters``.  Every other key is a parameter of the request.

What becomes of a value depends on what is known of the input:

- A model says its datatype.  The value's elements are read as such, and its shape gets leading ones up to the rank of
  the input: ``"x"`` for an input of shape [-1,-1] has the shape [1,1].
- A graph says nothing.  A text is what its Python nodes expect of one: ``BYTES`` whose content is the text itself in
  UTF-8, as many as the shape says.  A list of texts has each element behind its length.  Whole numbers are ``INT64``
  (``UINT64`` beyond its range), others ``FP64``, truth values ``BOOL``; a single one has the shape [1].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.api.kserve.rest.infer_request import parse_document, read_contents, read_id
from ovmstrio.api.raw_contents import raw_contents
from ovmstrio.core.datatypes import BY_NAME, BYTES, INVALID
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import Buffer
    from ovmstrio.core.tensor import TensorSpec

__all__ = ["read_generate_request"]

_PARAMETERS: Final = "parameters"
_ID: Final = "id"
_INT64: Final = range(-(2**63), 2**63)
_UINT64: Final = range(2**64)

Array = np.ndarray[Any, Any]


def read_generate_request(model: str, version: str, body: Buffer, inputs: Sequence[TensorSpec]) -> InferRequest:
    """Read a whole body.

    Args:
        model: the name in the path.
        version: the version in the path, or empty.
        body: the JSON object.
        inputs: what the servable takes.

    Raises:
        MalformedJson: the body is not JSON.
        InvalidRequest: anything else that the body should not be.
    """
    document = parse_document(body)
    specs = {spec.name: spec for spec in inputs}
    request = InferRequest(model, version, "" if _ID in specs else read_id(document))
    nested = document.get(_PARAMETERS, {})
    if _PARAMETERS not in specs:
        if not isinstance(nested, dict):
            raise InvalidRequest(f"{_PARAMETERS}: expected an object, got {nested!r:.80}")
        document = {name: value for name, value in document.items() if name != _PARAMETERS} | nested
    for name, value in document.items():
        if name in specs:
            _add_input(request, specs[name], value)
        elif name != _ID:
            _add_parameter(request, name, value, specs)
    return request


def _add_parameter(request: InferRequest, name: str, value: Any, specs: dict[str, TensorSpec]) -> None:
    if not isinstance(value, str | bool | int | float):
        known = ", ".join(specs) or "none"
        raise InvalidRequest(
            f"{name[:80]}: expected a text, number or boolean for a parameter, got {_kind(value)}; inputs are: {known}"
        )
    request.parameters[name] = value


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else "null"


def _add_input(request: InferRequest, spec: TensorSpec, value: Any) -> None:
    if spec.datatype is not INVALID:
        request.inputs.append(_typed(spec, value))
        return
    if isinstance(value, str):
        raw: Buffer = value.encode()
        given = InferInput(spec.name, BYTES.name, (len(raw),))
    else:
        tensor = _guessed(spec.name, _elements(spec.name, value))
        raw = raw_contents(tensor)
        given = InferInput(spec.name, tensor.datatype.name, tensor.shape)
    request.inputs.append(given)
    request.raw_inputs.append(raw)


def _elements(name: str, value: Any) -> Array:
    """Give a value, of which a single one is a list of one, as an array of objects."""
    array = np.array(value if isinstance(value, list) else [value], object)
    if not array.size:
        raise InvalidRequest(f"input {name}: expected at least one element, got an empty list")
    for element in array.flat:
        if isinstance(element, list):
            raise InvalidRequest(f"input {name}: expected lists of one length on each level, got lists of several")
        if not isinstance(element, str | int | float):
            raise InvalidRequest(f"input {name}: expected texts, numbers or booleans, got {_kind(element)}")
    return array


def _typed(spec: TensorSpec, value: Any) -> InferInput:
    array = _elements(spec.name, value)
    shape = (1,) * (len(spec.shape) - array.ndim) + array.shape
    given = InferInput(spec.name, spec.datatype.name, shape)
    given.contents = read_contents(given, array.ravel().tolist())
    return given


def _guessed(name: str, array: Array) -> Tensor:
    """Make a tensor of the narrowest datatype that has all the elements."""
    kinds = set(map(type, array.flat))
    if kinds == {str}:
        array[...] = np.vectorize(str.encode, otypes=[object])(array)
        return Tensor(name, BYTES, array)
    if kinds == {bool}:
        datatype = "BOOL"
    elif kinds == {int}:
        datatype = _integers(name, array)
    elif kinds <= {int, float}:
        datatype = "FP64"
    else:
        raise InvalidRequest(f"input {name}: expected elements of one type, got {_names(kinds)}")
    return Tensor(name, BY_NAME[datatype], array.astype(BY_NAME[datatype].numpy))


def _integers(name: str, array: Array) -> str:
    smallest, largest = min(array.flat), max(array.flat)
    if smallest in _INT64 and largest in _INT64:
        return "INT64"
    if smallest in _UINT64 and largest in _UINT64:
        return "UINT64"
    raise InvalidRequest(f"input {name}: {smallest} and {largest} fit no integer type together")


def _names(kinds: set[type]) -> str:
    words = {str: "texts", bool: "booleans", int: "numbers", float: "numbers"}
    return " and ".join(sorted({words[kind] for kind in kinds}))
