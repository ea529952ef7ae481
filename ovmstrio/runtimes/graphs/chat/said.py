"""Packets of a graph's outputs as bytes of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import GraphFailure, InvalidRequest
from ovmstrio.core.request import InferInput
from ovmstrio.core.tensor import RawTensor
from ovmstrio.runtimes.graphs.sinks import to_output
from ovmstrio.runtimes.graphs.tensors.graph_rejections import described
from ovmstrio.runtimes.models.strings import elements_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.graphs.packets import Packet

__all__ = ["Said", "SaidMaker"]

_BYTES_OF_TEXT: Final = frozenset({"BYTES", "UINT8", "INT8"})


class Said(NamedTuple):
    """What came out of an output: the output's name, and the bytes."""

    output: str
    data: bytes


class SaidMaker:
    """Makes texts of packets; ``outputs`` are the graph's, by number."""

    def __init__(self, graph: str, outputs: Sequence[str]) -> None:
        self._graph = graph
        self._outputs = outputs

    def __call__(self, output: int, packet: Packet) -> Said:
        """Take the bytes of a packet; elements behind their lengths are joined.

        Raises:
            GraphFailure: it carries numbers, or is no tensor.
        """
        name = self._outputs[output]
        made = to_output(name, packet.value)
        is_text = isinstance(made, RawTensor) and (
            made.datatype in _BYTES_OF_TEXT or made.datatype not in BY_NAME  # of a type of the user's own
        )
        if not isinstance(made, RawTensor) or not is_text:
            found = str(made.datatype) if isinstance(made, RawTensor) else type(made).__name__
            raise GraphFailure(
                f'the output "{name}" of the graph "{self._graph}" is no text: expected bytes of UTF-8, as in '
                f"Tensor({name!r}, text.encode()), got {found}"
            )
        return Said(name, _joined(made) if made.datatype == BYTES.name else bytes(made.data))


def _joined(tensor: RawTensor) -> bytes:
    """Join elements that are each behind their length; bytes that are not made so are the text itself."""
    given = InferInput(tensor.name, BYTES.name, tensor.shape)
    try:
        return b"".join(elements_of(given, tensor.data, described(given, BYTES)))
    except InvalidRequest:
        return bytes(tensor.data)
