"""Inference requests and responses, independent of protocols.

Front ends do not validate an :class:`InferRequest`; the servable does (``ovmstrio.models.validation``), so that all
protocols report the same errors.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.tensor import Array, RawTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import trio

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.tensor import Tensor, TensorSpec

SEQUENCE_ID: Final = "sequence_id"
SEQUENCE_CONTROL: Final = "sequence_control_input"
"""Request parameters or inputs that hold sequence id and control value of stateful models."""
RESTORED_STEPS: Final = "ovmstrio_restored_steps"
"""Response parameter, header and metadata: steps of a sequence that was restored after a crash."""

ENABLE_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"
FINAL_RESPONSE: Final = "triton_final_response"
"""Triton's parameters of a stream: of a request that wants its last reply marked, and of its replies."""

ParameterValue = bool | int | float | str
Buffer = bytes | bytearray | memoryview


@dataclass(slots=True)
class Contents:
    """Flattened tensor elements from protobuf's ``InferTensorContents`` or a JSON ``data`` list.

    ``field`` is the name of the protobuf field (``fp32_contents``, ...).  ``repeat_last`` fills missing elements with
    the
    last one, as in TensorFlow tensors.  ``is_checked``: the element types have been validated.
    """

    field: str
    values: Sequence[Any] | Array
    repeat_last: bool = False
    is_checked: bool = dataclasses.field(default=False, compare=False)


@dataclass(slots=True)
class InferInput:
    """One input tensor as received, not validated."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    contents: Contents | None = None
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(slots=True)
class RequestedOutput:
    """A requested output and its parameters; immutable, as requests may share it."""

    name: str
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(slots=True)
class InferRequest:
    """One inference request.

    Attributes:
        model_version: as sent; empty or ``"0"`` is the default version.
        raw_inputs: raw contents by input position (little-endian, packed; ``BYTES`` elements have a uint32 length
            prefix);
            None for an input with contents.
        keeps_rows: whether byte matrices are returned as they are, where output names would make them strings.
        event: the call event, to which services add times.
        arrival: position among the requests of the connection, where order matters.
        wants_all_packets: whether a graph returns every packet of its outputs instead of the first.
        max_output_bytes: maximum size of all outputs together.
        timeout_seconds: time limit of the inference, counted from its start.
        priority: rank among requests that wait for a batch: 1 before 2, 0 last.
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
    arrival: ArrivalTicket | None = None
    max_output_bytes: float = math.inf
    wants_all_packets: bool = False
    timeout_seconds: float = math.inf
    priority: int = 0

    def read_scheduling(self) -> None:
        """Set timeout and priority from Triton's parameters ``timeout`` (microseconds) and ``priority``.

        Other types than unsigned integers are left to user code; 0 is the same as no value.
        """
        timeout, priority = self.parameters.get("timeout"), self.parameters.get("priority")
        if type(timeout) is int and timeout > 0:
            self.timeout_seconds = timeout / 1e6
        if type(priority) is int and priority > 0:
            self.priority = priority


@dataclass(slots=True)
class InferResponse:
    """Response to one inference request; ``outputs`` are in display order (by name for models).

    Attributes:
        is_private: whether the memory of the outputs is neither shared nor reused.
    """

    model_name: str
    model_version: str
    outputs: list[Tensor | RawTensor]
    id: str = ""
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    is_private: bool = False

    @property
    def lies_as_sent(self) -> bool:
        """True if the outputs can be sent without a copy: private memory in row-major order."""
        return self.is_private and all(
            isinstance(output, RawTensor) or (output.array.flags.c_contiguous and not output.array.dtype.hasobject)
            for output in self.outputs
        )

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Names and values of HTTP headers or gRPC metadata: restored steps of a sequence, which no body may hold."""
        steps = self.parameters.get(RESTORED_STEPS)
        return () if steps is None else ((RESTORED_STEPS, str(steps)),)

    @property
    def nbytes(self) -> int:
        """Size of all outputs in bytes."""
        size = 0
        for output in self.outputs:
            size += output.nbytes
        return size


@dataclass(frozen=True, slots=True)
class StreamProblem:
    """Error of one request of a stream that stays open; ``response`` names the request, without outputs."""

    message: str
    response: InferResponse | None = None


StreamReply = InferResponse | StreamProblem


@dataclass(frozen=True, slots=True)
class ServableMetadata:
    """Metadata of a servable.

    ``inputs`` and ``outputs`` are sorted by name.  ``extra`` is added to REST metadata (``rt_info``).  ``joined_rows``
    is
    the maximum batch of joined requests, 0 without batching.  ``labels`` are class names by index.
    """

    name: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    joined_rows: int = 0
    has_sequences: bool = False
    labels: tuple[str, ...] = ()


# Arrival order

_SETTLED: Final = -1

_Queue = tuple[str, int]
"""Service name and number of turns taken."""


class ArrivalOrder:
    """Order of the received requests of one connection, for services that keep order.

    Costs do not depend on the number of requests.

    Attributes:
        waiting: number of waiting requests by queue; no empty queues.
    """

    __slots__ = ("_named", "_unnamed", "waiting")

    def __init__(self) -> None:
        self._unnamed: list[tuple[int, ArrivalTicket]] = []
        self._named: dict[_Queue, list[tuple[int, ArrivalTicket]]] = {}
        self.waiting: dict[_Queue, int] = {}

    def note(self, number: int) -> ArrivalTicket:
        """Register a received request; the handler must settle it in the end.

        Numbers grow with time.  Requests of one read may be registered in any order before any task runs.
        """
        arrival, unnamed = ArrivalTicket(self, number), self._unnamed
        # Written out, as in other methods here: this runs for every request.
        while unnamed and (unnamed[0][1].name or unnamed[0][1].turns):
            heapq.heappop(unnamed)
        heapq.heappush(unnamed, (number, arrival))
        return arrival

    def put(self, arrival: ArrivalTicket) -> None:
        """Add a request to its next queue, after all earlier requests were added."""
        queue = arrival.name, arrival.turns
        named = self._named.get(queue)
        if named is None:
            self._named[queue] = [(arrival.number, arrival)]
        else:
            heapq.heappush(named, (arrival.number, arrival))

    def first(self, queue: _Queue) -> ArrivalTicket | None:
        """Return the first request of a queue; None while an earlier request may be for the same service."""
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

    def pass_on(self, arrival: ArrivalTicket) -> bool:
        """Move the request to its next queue if it is first; return whether it was."""
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

    async def wait(self, arrival: ArrivalTicket) -> None:
        """Wait until a request is the first of its queue."""
        import trio  # noqa: PLC0415 - clients import this module without trio

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
        """Wake up first requests after a request has left a queue or is known not to join it."""
        if queue in self._named or self.waiting:
            self.first(queue)
        for each in tuple(self.waiting) if self.waiting else ():
            first = self.first(each)
            if first is not None and first.turn is not None:
                first.turn.set()


class ArrivalTicket:
    """Position of one request.

    Attributes:
        number: grows with the time of receipt.
        name: service of the request; empty until known.
        turns: turns taken; negative after :meth:`settle`.
        turn: set when the request is the first of its queue.
    """

    __slots__ = ("_arrivals", "name", "number", "turn", "turns")

    def __init__(self, arrivals: ArrivalOrder, number: int) -> None:
        self._arrivals = arrivals
        self.number = number
        self.name = ""
        self.turns = 0
        self.turn: trio.Event | None = None

    def call(self, name: str) -> None:
        """Set the service, so that requests for other services do not wait for this one."""
        if not self.name and name:
            self.name = name
            self._arrivals.put(self)
            if self._arrivals.waiting:
                self._arrivals.left(("", 0))

    async def take_turn(self) -> None:
        """Wait until every earlier request for the same service has taken as many turns or is settled.

        Work up to the next checkpoint runs in arrival order.

        Cancellation: a request that is not settled blocks later ones.  Not a checkpoint without earlier requests.
        """
        while not self._arrivals.pass_on(self):
            await self._arrivals.wait(self)

    def settle(self) -> None:
        """Release all requests that wait for this one; idempotent."""
        if self.turns != _SETTLED:
            queue, self.turns = (self.name, self.turns), _SETTLED
            if self.name or self._arrivals.waiting:
                self._arrivals.left(queue)
