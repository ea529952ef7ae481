"""The documents that most REST inferences are: tensors of flat numbers with nothing said about them, read in one go.

Whatever is anything else, right or wrong, is left to the careful way, which says the same of what is read here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.request import Contents, InferInput, InferRequest, RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ELEMENT_TYPES", "MOST_SIZE", "NUMBER", "read_plain_request"]

MOST_SIZE: Final = 2**31 - 1
"""Of a dimension."""

NUMBER: Final[frozenset[type]] = frozenset({int, float})
ELEMENT_TYPES: Final[Mapping[str, frozenset[type]]] = {
    "bool_contents": frozenset({bool}),
    "int_contents": frozenset({int}),
    "int64_contents": frozenset({int}),
    "uint_contents": frozenset({int}),
    "uint64_contents": frozenset({int}),
    "fp32_contents": NUMBER,
    "fp64_contents": NUMBER,
    "bytes_contents": frozenset({str}),
}
"""What the elements of a list of JSON may be, by the field of gRPC that carries them."""

_FIELDS: Final = {name: (row.contents_field, ELEMENT_TYPES[row.contents_field]) for name, row in BY_NAME.items()}
_MEMBERS: Final = 4
"""Of an input of which nothing is said but its name, shape, datatype and data."""


def read_plain_request(model: str, version: str, document: dict[str, Any]) -> InferRequest | None:
    """Read a document whose inputs all have their elements in flat lists, and whose tensors have no parameters.

    None for any other.
    """
    given, wanted, id_ = document.get("inputs"), document.get("outputs"), document.get("id", "")
    if type(given) is not list or type(id_) is not str or "parameters" in document:
        return None
    inputs = []
    for each in given:
        read = _plain_input(each)
        if read is None:
            return None
        inputs.append(read)
    if wanted is None:
        return None if "outputs" in document else InferRequest(model, version, id_, {}, inputs)
    if type(wanted) is not list:
        return None
    outputs = []
    for each in wanted:
        if type(each) is not dict or len(each) != 1 or type(name := each.get("name")) is not str:
            return None
        outputs.append(RequestedOutput(name))
    return InferRequest(model, version, id_, {}, inputs, outputs)


def _plain_input(given: Any) -> InferInput | None:
    if type(given) is not dict or len(given) != _MEMBERS:
        return None
    name, shape, datatype, data = given.get("name"), given.get("shape"), given.get("datatype"), given.get("data")
    if type(name) is not str or type(datatype) is not str:
        return None
    if type(shape) is not list or type(data) is not list or not data:
        return None
    for size in shape:
        if type(size) is not int or not 0 <= size <= MOST_SIZE:
            return None
    field = _FIELDS.get(datatype)
    if field is None or not field[1].issuperset(map(type, data)):
        return None
    return InferInput(name, datatype, tuple(shape), Contents(field[0], data, is_checked=True))
