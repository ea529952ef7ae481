"""A call and its answer, free of any wire format.

A front end turns bytes into an :class:`InferRequest` without judging it; a servable validates it against its own
inputs (``ovmstrio.models.validation``), so that every protocol rejects the same things in the same words.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.tensor import Array, RawTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.tensor import Tensor, TensorSpec

__all__ = [
    "SEQUENCE_CONTROL",
    "SEQUENCE_ID",
    "Arrival",
    "Arrivals",
    "Buffer",
    "Contents",
    "InferInput",
    "InferRequest",
    "InferResponse",
    "ParameterValue",
    "RequestedOutput",
    "ServableMetadata",
    "StreamProblem",
    "StreamReply",
]

# ----------------------------------------------------------------------
# A call and its answer, free of any wire format
# ----------------------------------------------------------------------

SEQUENCE_ID: Final = "sequence_id"
SEQUENCE_CONTROL: Final = "sequence_control_input"
"""The inputs by which a client of a stateful model says to which sequence a request belongs, and where that begins."""

ParameterValue = bool | int | float | str
Buffer = bytes | bytearray | memoryview


@dataclass(slots=True)
class Contents:
    """Values that came one by one: protobuf's ``InferTensorContents`` or a JSON ``data`` list, flattened.

    ``field`` names the one field that was filled (``fp32_contents``, ...); ``values`` are its elements.  With
    ``repeat_last`` the last of them stands for all that are missing, as in TensorFlow's tensors.  ``is_checked`` says
    that each is of a type that the field may have, which need not be looked at again.
    """

    field: str
    values: Sequence[Any] | Array
    repeat_last: bool = False
    is_checked: bool = dataclasses.field(default=False, compare=False)


@dataclass(slots=True)
class InferInput:
    """One input tensor as the caller described it; nothing here has been checked."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    contents: Contents | None = None
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(slots=True)
class RequestedOutput:
    """An output that the caller named, with what it said about it; nobody changes one, as requests may share it."""

    name: str
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(slots=True)
class InferRequest:
    """One inference call.

    ``model_version`` is as sent: empty or ``"0"`` means the default version.  ``raw_inputs`` holds one buffer an
    input, by position, where the caller used raw contents (elements little-endian and packed; ``BYTES`` elements each
    behind a little-endian uint32 length), and None for an input that has contents where the protocol lets a request
    use both.  ``deadline`` is on trio's clock.  ``keeps_rows`` asks for matrices of bytes as they are, where the names
    of outputs would make them strings: the caller is no client.  ``received`` is how many bytes it came in; ``event``
    is what observers see of the call that it belongs to, for whoever works on it to tell times.  ``arrival`` is its
    place among those of its connection, where several of one may be under way.
    With ``wants_all_packets`` a graph answers with every packet of its outputs, an output each, and not with the first.
    ``most_bytes`` is how large the outputs may be together, of a call whose answer goes to a client.
    """

    model_name: str
    model_version: str = ""
    id: str = ""
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    inputs: list[InferInput] = field(default_factory=list)
    outputs: list[RequestedOutput] = field(default_factory=list)
    raw_inputs: list[Buffer | None] = field(default_factory=list)
    deadline: float = math.inf
    keeps_rows: bool = False
    received: int = 0
    event: CallEvent | None = None
    arrival: Arrival | None = None
    most_bytes: float = math.inf
    wants_all_packets: bool = False


@dataclass(slots=True)
class InferResponse:
    """The answer to one inference call; ``outputs`` are in the order in which they are shown (by name, for models).

    Attributes:
        is_private: whether nobody else has the memory of the outputs, or may change it.
    """

    model_name: str
    model_version: str
    outputs: list[Tensor | RawTensor]
    id: str = ""
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    is_private: bool = False

    @property
    def lies_as_sent(self) -> bool:
        """Whether the outputs can be sent from where they lie, as their elements stand there in row-major order."""
        return self.is_private and all(
            isinstance(output, RawTensor) or (output.array.flags.c_contiguous and not output.array.dtype.hasobject)
            for output in self.outputs
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all outputs."""
        size = 0
        for output in self.outputs:
            size += output.nbytes
        return size


@dataclass(frozen=True, slots=True)
class StreamProblem:
    """What was wrong with one request of a stream, which goes on."""

    message: str


StreamReply = InferResponse | StreamProblem
"""What a stream answers with."""


@dataclass(frozen=True, slots=True)
class ServableMetadata:
    """What a servable tells of itself.

    ``inputs`` and ``outputs`` are sorted by name.  ``extra`` goes into the REST answer as it is (``rt_info``).
    ``joined_rows`` is up to how many rows of different requests are run together, 0 where each runs alone.  ``labels``
    name the classes of its outputs, by their index.
    """

    name: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    joined_rows: int = 0
    has_sequences: bool = False
    labels: tuple[str, ...] = ()


# ----------------------------------------------------------------------
# The order in which the requests of one connection have come, for those that it matters to
# ----------------------------------------------------------------------

_SETTLED: Final = -1

_Queue = tuple[str, int]
"""What the requests of a queue call, and how many turns they have had."""


class Arrivals:
    """The requests of one connection that have come whole and are not where order matters yet.

    Noting, naming and settling cost the same however many there are.

    Attributes:
        waiting: how many requests wait for their turns, by queue; no queue without one.
    """

    __slots__ = ("_named", "_unnamed", "waiting")

    def __init__(self) -> None:
        self._unnamed: list[tuple[int, Arrival]] = []
        self._named: dict[_Queue, list[tuple[int, Arrival]]] = {}
        self.waiting: dict[_Queue, int] = {}

    def note(self, number: int) -> Arrival:
        """Note a request that has come whole, as that number; whoever serves it must settle it in the end.

        Numbers grow with time.  Those of one read may be noted in any order, before any task runs.
        """
        arrival, unnamed = Arrival(self, number), self._unnamed
        # Written out, as are others here: this is done for every request.
        while unnamed and (unnamed[0][1].name or unnamed[0][1].turns):
            heapq.heappop(unnamed)
        heapq.heappush(unnamed, (number, arrival))
        return arrival

    def put(self, arrival: Arrival) -> None:
        """Put a request into its next queue, where all that came before it are already, or have been."""
        queue = arrival.name, arrival.turns
        named = self._named.get(queue)
        if named is None:
            self._named[queue] = [(arrival.number, arrival)]
        else:
            heapq.heappush(named, (arrival.number, arrival))

    def first(self, queue: _Queue) -> Arrival | None:
        """Give the request of a queue whose turn it is; None while one before it may be for the same service."""
        unnamed, named = self._unnamed, self._named.get(queue)
        while unnamed and (unnamed[0][1].name or unnamed[0][1].turns):
            heapq.heappop(unnamed)
        while named and named[0][1].turns != queue[1]:
            heapq.heappop(named)
        if not named:
            self._named.pop(queue, None)
            return None
        number, first = named[0]
        return None if unnamed and unnamed[0][0] < number else first

    def pass_on(self, arrival: Arrival) -> bool:
        """Put a request into its next queue if it is its turn; tells whether it was."""
        before = arrival.name, arrival.turns
        if self.first(before) is not arrival:
            return False
        named = self._named[before]
        heapq.heappop(named)
        if not named:
            del self._named[before]
        arrival.turns += 1
        self.put(arrival)
        if self.waiting:
            self.left(before)
        return True

    async def wait(self, arrival: Arrival) -> None:
        """Wait until a request is the first of its queue."""
        queue = arrival.name, arrival.turns
        arrival.turn = trio.Event()
        self.waiting[queue] = self.waiting.get(queue, 0) + 1
        try:
            await arrival.turn.wait()
        finally:
            self.waiting[queue] -= 1
            if not self.waiting[queue]:
                del self.waiting[queue]

    def left(self, queue: _Queue) -> None:
        """Look whose turn it is, as a request has left a queue, or is known not to be in it."""
        if queue in self._named or self.waiting:
            self.first(queue)
        for each in tuple(self.waiting) if self.waiting else ():
            first = self.first(each)
            if first is not None and first.turn is not None:
                first.turn.set()


class Arrival:
    """One request.

    Attributes:
        number: grows with the time at which it was whole.
        name: of the service that it is for; empty until that is known.
        turns: how many it has had; below 0 when nobody waits for it any more.
        turn: is set when it is the first of those that it waits with.
    """

    __slots__ = ("_all", "name", "number", "turn", "turns")

    def __init__(self, arrivals: Arrivals, number: int) -> None:
        self._all = arrivals
        self.number = number
        self.name = ""
        self.turns = 0
        self.turn: trio.Event | None = None

    def call(self, name: str) -> None:
        """Say which service it is for, so that nobody who calls another one waits for it."""
        if not self.name and name:
            self.name = name
            self._all.put(self)
            if self._all.waiting:
                self._all.left(("", 0))

    async def take_turn(self) -> None:
        """Wait until every request for the same service that came before has taken as many turns, or is settled.

        What is done before the next checkpoint is done in the order of arrival.

        Cancellation: while it waits; a request that is not settled holds up later ones.  Not a checkpoint if none is
        before it.
        """
        while not self._all.pass_on(self):
            await self._all.wait(self)

    def settle(self) -> None:
        """Let nobody wait for it any more; may be called again."""
        if self.turns != _SETTLED:
            queue, self.turns = (self.name, self.turns), _SETTLED
            if self.name or self._all.waiting:
                self._all.left(queue)
