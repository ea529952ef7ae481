"""Large predict calls whose numbers become arrays without ever being objects of Python.

They are read so where they are plain: numbers alone, in lists of equal lengths, for inputs of the model.  Whatever
is not goes the careful way, which says the same of these.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.api.kserve.rest.infer_request import NUMBER_KINDS
from ovmstrio.api.kserve.rest.large_document import count_lists, read_large_member
from ovmstrio.core.request import Contents, InferInput
from ovmstrio.core.tensor import Array
from ovmstrio.util.number_arrays import read_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.api.kserve.rest.large_document import LargeData
    from ovmstrio.core.datatypes import Datatype
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.util.number_arrays import NumberKind

__all__ = ["read_arrays", "read_large_predict"]

_MOST_LEVELS: Final = 32
_BYTES_A_LIST: Final = 128
"""Of a document whose lists are few enough to be looked at one by one: that costs as much as some numbers do."""
_ROWS: Final = "instances"
_COLUMNS: Final = "inputs"


def read_large_predict(body: bytes, inputs: Sequence[TensorSpec]) -> tuple[bool, list[InferInput]] | None:
    """Read a whole body: whether it goes by rows, and the inputs; None for one that is not plain.

    Args:
        body: the JSON.
        inputs: those of the model.
    """
    lists = count_lists(body)
    if lists > len(body) // _BYTES_A_LIST:
        return None
    member = read_large_member(body, (_ROWS, _COLUMNS), _MOST_LEVELS)
    if member is None:
        return None
    by_rows = member.name == _ROWS
    given: Mapping[str, LargeData] = member.members
    if member.data is not None:
        if len(inputs) != 1:
            return None
        given = {inputs[0].name: member.data}
    elif by_rows:
        return None
    read = _read_all(given, {spec.name: spec.datatype for spec in inputs}, lists)
    return None if not read else (by_rows, read)


def _read_all(given: Mapping[str, LargeData], datatypes: Mapping[str, Datatype], lists: int) -> list[InferInput] | None:
    seen, inputs = 0, []
    for name, data in given.items():
        nesting = data.nesting(lists)
        read = None if nesting is None or name not in datatypes else _read(name, datatypes[name], data, nesting[0])
        if nesting is None or read is None:
            return None
        seen += nesting[1]
        inputs.append(read)
    # There is a list among the numbers of one, or elsewhere in the document.
    return inputs if seen == lists else None


def read_arrays(name: str, datatype: Datatype, value: Any) -> InferInput | None:
    """Read an input from an array of numbers, or from the rows of a list that are all such arrays; None otherwise."""
    kind = _kind_of(datatype)
    array = None if kind is None else read_numbers(value, kind)
    return None if array is None else _input(name, datatype, array.ravel(), array.shape)


def _read(name: str, datatype: Datatype, data: LargeData, shape: tuple[int, ...]) -> InferInput | None:
    kind = _kind_of(datatype)
    array = None if kind is None else data.numbers(kind)
    return None if array is None or array.size != prod(shape) else _input(name, datatype, array, shape)


def _kind_of(datatype: Datatype) -> NumberKind | None:
    return None if datatype.name == "BF16" else NUMBER_KINDS.get(datatype.contents_field)


def _input(name: str, datatype: Datatype, array: Array, shape: tuple[int, ...]) -> InferInput:
    if datatype.numpy.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(datatype.numpy)
    return InferInput(name, datatype.name, shape, Contents(datatype.contents_field, array))
