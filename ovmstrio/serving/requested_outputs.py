"""Requested outputs: output selection and the classification extension, for every kind of service."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import trio

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import FINAL_RESPONSE, SEQUENCE_ID
from ovmstrio.core.tensor import BYTES, RawTensor, Tensor, from_bf16
from ovmstrio.util.truncation import cut, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ovmstrio.core.request import InferRequest, InferResponse, RequestedOutput, ServableMetadata
    from ovmstrio.core.tensor import TensorSpec

_COUNT: Final = "classification"
_ON_LOOP_BYTES: Final = 64 * 1024
"""Size of outputs that are sorted in a few milliseconds."""


def check_classes(wanted: Sequence[RequestedOutput]) -> None:
    """Check the requested numbers of classes before inference.

    Raises:
        InvalidRequest: a value is not a non-negative integer.
    """
    for output in wanted:
        count = output.parameters.get(_COUNT, 0)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidRequest(
                f"output {cut(output.name, 80)}: {_COUNT}: expected a number of classes, got {shown(count, 40)}"
            )


def classify_outputs(response: InferResponse, wanted: Sequence[RequestedOutput], labels: Sequence[str]) -> None:
    """Replace outputs by their top classes as ``value:index[:label]`` texts, row by row.

    Raises:
        InvalidRequest: an output is not numeric.
    """
    counts = {output.name: int(count) for output in wanted if (count := output.parameters.get(_COUNT))}
    for position, tensor in enumerate(response.outputs) if counts else ():
        if tensor.name in counts:
            response.outputs[position] = _classes(tensor, counts[tensor.name], labels)


async def classify_large_outputs(
    response: InferResponse, wanted: Sequence[RequestedOutput], labels: Sequence[str]
) -> None:
    """Replace outputs as :func:`classify_outputs`, in a worker thread unless they are small.

    Raises:
        InvalidRequest: an output is not numeric.
    """
    if any(_COUNT in output.parameters for output in wanted):
        if response.nbytes <= _ON_LOOP_BYTES:
            classify_outputs(response, wanted, labels)
        else:
            await trio.to_thread.run_sync(classify_outputs, response, wanted, labels)


def _classes(tensor: Tensor | RawTensor, count: int, labels: Sequence[str]) -> Tensor:
    if isinstance(tensor, RawTensor) or tensor.datatype is BYTES or not tensor.shape:
        raise InvalidRequest(f"output {tensor.name}: {_COUNT} needs numbers, and this is {tensor.datatype_name}")
    array = from_bf16(tensor.array) if tensor.datatype.name == "BF16" else tensor.array
    rows = array.reshape(array.shape[0], prod(array.shape[1:])) if array.ndim > 1 else array.reshape(1, array.size)
    count = min(count, rows.shape[1])
    texts = np.empty((len(rows), count), object)
    for number, row in enumerate(rows):
        # numpy sorts NaN last, as the largest; here it must be the smallest.
        # The reversed sort ranks the first of equal elements first, as argmax does.
        ordered = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
        ranked = row.size - 1 - np.argsort(ordered[::-1], kind="stable")[::-1]
        for place, index in enumerate(ranked[:count].tolist()):
            texts[number, place] = _text(row[index], index, labels).encode()
    return Tensor(tensor.name, BYTES, texts if array.ndim > 1 else texts[0])


def _text(value: Any, index: int, labels: Sequence[str]) -> str:
    number = f"{float(value):f}" if value.dtype.kind == "f" else str(int(value))
    return f"{number}:{index}:{labels[index]}" if index < len(labels) else f"{number}:{index}"


_ENCODING_PARAMETERS: Final = frozenset({"binary_data", "binary_data_size"})
"""REST encoding parameters, which do not change the result."""


def has_plain_outputs(request: InferRequest, known: Sequence[TensorSpec]) -> bool:
    """Return True if no tensor has parameters and all requested outputs are known, so that no checks are needed."""
    for given in request.inputs:
        if given.parameters and not _ENCODING_PARAMETERS.issuperset(given.parameters):
            return False
    for wanted in request.outputs:
        if wanted.parameters and not _ENCODING_PARAMETERS.issuperset(wanted.parameters):
            return False
        for spec in known:
            if spec.name == wanted.name:
                break
        else:
            return False
    return True


def check_outputs(wanted: Sequence[RequestedOutput], known: Sequence[TensorSpec]) -> None:
    """Check requested outputs before inference, which may change the state of a sequence.

    ``known`` is empty if the outputs are unknown.

    Raises:
        InvalidRequest: a name is unknown, or a number of classes is invalid.
    """
    check_classes(wanted)
    if known:
        _check_names(wanted, [*(spec.name for spec in known), SEQUENCE_ID])


def select_outputs(response: InferResponse, wanted: Sequence[RequestedOutput]) -> None:
    """Reduce a response to the requested outputs, in that order; a sequence id is always kept.

    Raises:
        InvalidRequest: a requested output is missing.
    """
    if len(wanted) == len(response.outputs) == 1 and wanted[0].name == response.outputs[0].name:
        return
    given = {tensor.name: tensor for tensor in response.outputs}
    _check_names(wanted, given)
    names = dict.fromkeys(output.name for output in wanted)
    if SEQUENCE_ID in given:
        names[SEQUENCE_ID] = None
    response.outputs = [given[name] for name in names]


def _check_names(wanted: Sequence[RequestedOutput], known: Iterable[str]) -> None:
    known = [*known]
    unknown = [output.name for output in wanted if output.name not in known]
    if unknown:
        names = ", ".join(name for name in known if name != SEQUENCE_ID)
        raise InvalidRequest(
            f"requested outputs: expected some of {names or 'none'}, "
            f"got {', '.join(name[:80] for name in unknown[:10])}"
        )


class StreamOutputs:
    """The outputs that the first request of a stream selects for all replies.

    Raises:
        InvalidRequest: as :func:`check_outputs`.
    """

    def __init__(self, first: InferRequest, known: ServableMetadata) -> None:
        if first.outputs:
            check_outputs(first.outputs, known.outputs)
        self._wanted = first.outputs
        self._names = {output.name for output in first.outputs}
        self._labels = known.labels

    def check(self, request: InferRequest) -> None:
        """Check that a later request selects the same outputs, or none.

        Raises:
            InvalidRequest: it selects others.
        """
        if request.outputs and request.outputs != self._wanted:
            names = ", ".join(sorted(self._names)) or "all, as none were named"
            raise InvalidRequest(
                f"requested outputs: expected those of the stream's first request ({names}), got others"
            )

    def keep(self, reply: InferResponse) -> bool:
        """Reduce a reply to the selected outputs; return False if none is left and the reply marks no end.

        Raises:
            InvalidRequest: classes are requested of an output that is not numeric.
        """
        if not self._wanted:
            return True
        reply.outputs = [tensor for tensor in reply.outputs if tensor.name in self._names]
        classify_outputs(reply, self._wanted, self._labels)
        return bool(reply.outputs) or reply.parameters.get(FINAL_RESPONSE) is True
