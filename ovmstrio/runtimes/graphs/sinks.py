"""Where the outputs of an instance go: the first packet of each, or all, for a call; every one at once for a stream.

On the way packets become what a response carries.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import trio

from ovmstrio.core.errors import PayloadTooLarge
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.runtimes.graphs.graph_failures import graph_failure
from ovmstrio.runtimes.graphs.graph_requests import TIMESTAMP_PARAMETER
from ovmstrio.runtimes.graphs.packets import TensorValue
from ovmstrio.runtimes.graphs.tensors.python_tensors import contents_of
from pyovms import Tensor as PythonTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.core.request import StreamProblem
    from ovmstrio.runtimes.graphs.packets import Packet

__all__ = ["GRAPH_VERSION", "AllPackets", "FirstPackets", "Replies", "ResponseMaker", "to_output"]

_T = TypeVar("_T")

GRAPH_VERSION: Final = "1"
"""The version that every graph has."""


class FirstPackets:
    """Keeps the first packet of each output."""

    def __init__(self, outputs: int) -> None:
        self.packets: list[Packet | None] = [None] * outputs

    def put(self, output: int, packet: Packet) -> bool:
        """Keep a packet, if it is the first of its output."""
        if self.packets[output] is None:
            self.packets[output] = packet
        return True

    async def wait_room(self) -> None:
        """There is always room.  Never waits."""


class AllPackets:
    """Keeps every packet of each output, as far as an answer may be large.

    Attributes:
        packets: what came, by the numbers of outputs.
    """

    def __init__(self, outputs: Sequence[str], most_bytes: float) -> None:
        self.packets: list[list[Packet]] = [[] for _ in outputs]
        self._outputs = outputs
        self._most_bytes = most_bytes
        self._size = 0

    def put(self, output: int, packet: Packet) -> bool:
        """Keep a packet.

        Raises:
            PayloadTooLarge: all together are larger than an answer may be.
            ServerError: its value cannot be written into a response.
        """
        self._size += to_output(self._outputs[output], packet.value).nbytes
        if self._size > self._most_bytes:
            raise PayloadTooLarge.of_outputs(self._size, self._most_bytes)
        self.packets[output].append(packet)
        return True

    async def wait_room(self) -> None:
        """There is always room.  Never waits."""


class Replies(Generic[_T]):
    """Makes a reply of each packet and sends it into a channel; what has no room there waits here.

    ``make`` makes a reply of an output's number and a packet.
    """

    def __init__(self, make: Callable[[int, Packet], _T], channel: trio.MemorySendChannel[_T | StreamProblem]) -> None:
        self._make = make
        self._channel = channel
        self._overflow: deque[_T | StreamProblem] = deque()
        self._lock = trio.Lock()

    def put(self, output: int, packet: Packet) -> bool:
        """Take a packet.

        Raises:
            ServerError: its value cannot be written into a response.
        """
        return self.reply(self._make(output, packet))

    def reply(self, reply: _T | StreamProblem) -> bool:
        """Take a reply; False if no more should come before :meth:`wait_room`."""
        if not self._overflow:
            try:
                self._channel.send_nowait(reply)
            except trio.WouldBlock:
                pass
            except trio.BrokenResourceError:
                # Nobody reads any more; the instance is about to be cancelled.
                return True
            else:
                return True
        self._overflow.append(reply)
        return False

    async def wait_room(self) -> None:
        """Return when everything that was taken is in the channel.

        Cancellation: at once; nothing is lost.
        """
        async with self._lock:
            while self._overflow:
                try:
                    await self._channel.send(self._overflow[0])
                except trio.BrokenResourceError:
                    self._overflow.clear()
                    return
                self._overflow.popleft()


class ResponseMaker:
    """Makes a response of each packet."""

    def __init__(self, graph: str, outputs: Sequence[str]) -> None:
        self._graph = graph
        self._outputs = outputs

    def __call__(self, output: int, packet: Packet) -> InferResponse:
        """Give the response that shows the packet of the output with this number.

        Raises:
            GraphFailure: the value is of a type that no response can carry.
        """
        name = self._outputs[output]
        made = to_output(name, packet.value)
        parameters: dict[str, bool | int | float | str] = {TIMESTAMP_PARAMETER: packet.timestamp}
        if isinstance(made, InferResponse):
            made.model_name, made.model_version, made.id = self._graph, GRAPH_VERSION, ""
            made.parameters |= parameters
            return made
        return InferResponse(self._graph, GRAPH_VERSION, [made], "", parameters)


def to_output(stream: str, value: Any) -> Tensor | RawTensor | InferResponse:
    """Make of a packet's value what a response shows under the stream's name.

    A Python tensor keeps its own name, datatype and shape, whether or not they fit its bytes.  A whole response
    stands for itself; the caller gets one of its own to fill in.

    Raises:
        GraphFailure: the value is of a type that no response can carry.
    """
    if isinstance(value, PythonTensor):
        return RawTensor(value.name, value.datatype, value.shape, contents_of(value))
    if isinstance(value, TensorValue):
        return Tensor(stream, value.datatype, value.array)
    if isinstance(value, InferResponse):
        return replace(value, outputs=list(value.outputs), parameters=dict(value.parameters))
    raise graph_failure(
        f'Packet type mismatch on the graph\'s output stream "{stream}": expected a tensor, an image or a response, '
        f"got {type(value).__name__}"
    )
