"""The classification extension: the largest elements of an output in place of all of them, as texts.

A text is ``value:index``, and ``value:index:label`` where the model has a file of labels.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ovmstrio.core.datatypes import BYTES, from_bf16
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.core.texts import cut, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.request import InferResponse, RequestedOutput

__all__ = ["check_classes", "keep_classes"]

_COUNT: Final = "classification"


def check_classes(wanted: Sequence[RequestedOutput]) -> None:
    """See that what a call says of classes can be done, before it is made.

    Raises:
        InvalidRequest: their number is none.
    """
    for output in wanted:
        count = output.parameters.get(_COUNT, 0)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidRequest(
                f"output {cut(output.name, 80)}: {_COUNT}: expected a number of classes, got {shown(count, 40)}"
            )


def keep_classes(response: InferResponse, wanted: Sequence[RequestedOutput], labels: Sequence[str]) -> None:
    """Replace outputs of which only so many classes are wanted; those of more than one dimension, row by row.

    Raises:
        InvalidRequest: an output has no numbers.
    """
    counts = {output.name: int(count) for output in wanted if (count := output.parameters.get(_COUNT))}
    for position, tensor in enumerate(response.outputs) if counts else ():
        if tensor.name in counts:
            response.outputs[position] = _classes(tensor, counts[tensor.name], labels)


def _classes(tensor: Tensor | RawTensor, count: int, labels: Sequence[str]) -> Tensor:
    if isinstance(tensor, RawTensor) or tensor.datatype is BYTES or not tensor.shape:
        raise InvalidRequest(f"output {tensor.name}: {_COUNT} needs numbers, and this is {tensor.datatype_name}")
    array = from_bf16(tensor.array) if tensor.datatype.name == "BF16" else tensor.array
    rows = array.reshape(array.shape[0], prod(array.shape[1:])) if array.ndim > 1 else array.reshape(1, array.size)
    count = min(count, rows.shape[1])
    texts = np.empty((len(rows), count), object)
    for number, row in enumerate(rows):
        # NaN is the largest in numpy's order, and no class at all.
        ranked = np.argsort(np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row, kind="stable")
        for place, index in enumerate(ranked[::-1][:count].tolist()):
            texts[number, place] = _text(row[index], index, labels).encode()
    return Tensor(tensor.name, BYTES, texts if array.ndim > 1 else texts[0])


def _text(value: Any, index: int, labels: Sequence[str]) -> str:
    number = f"{float(value):f}" if value.dtype.kind == "f" else str(int(value))
    return f"{number}:{index}:{labels[index]}" if index < len(labels) else f"{number}:{index}"
