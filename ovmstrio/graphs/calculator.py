"""Interfaces between the graph engine and calculators.

::

    CalculatorKind   one per registered name             contract(node), load(node, scope) -> NodeResources
    NodeResources    one per node of a loaded graph      open(context) -> Calculator; aclose()
    Calculator       one per node of a running instance  process(context); close(context)

Third parties register kinds through the entry-point group ``ovmstrio.calculators``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from ovmstrio.graphs.graph_config import NodeConfig, Port
from ovmstrio.graphs.packets import DONE, Packet

if TYPE_CHECKING:
    import trio

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.payloads import TextApiAdapter
    from ovmstrio.core.request import ParameterValue
    from ovmstrio.core.service import ServableLookup
    from ovmstrio.isolation.isolated_code import Isolation
    from ovmstrio.isolation.thread_pool import WorkerThreads

_NO_BOUNDS: Final[Mapping[Port, int]] = MappingProxyType({})


class ContractError(Exception):
    """A node does not satisfy its calculator's contract.

    ``fix`` is a hint, if one is known. ``code`` is the absl status of MediaPipe, such as ``INVALID_ARGUMENT``.
    """

    def __init__(self, message: str, *, fix: str = "", code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.code = code


class NodeFailure(Exception):
    """A node failed on its input.

    ``message`` is sent to the client after the node's name; ``code`` is the absl status.  ``user_type`` is the type of
    the user's exception that the failure reports, or empty.
    """

    user_type: str = ""

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True, slots=True)
class NodeContract:
    """Types of a node's streams and side packets by port; ``object`` accepts any type.

    Attributes:
        side_outputs: side packets set by :meth:`NodeResources.open`.
        optional_side: side packets that the node can run without.
        propagates_bounds: a run that emits nothing on an output raises the output's bound past the run's timestamp
            (MediaPipe's timestamp offset 0). Otherwise consumers wait for a later packet or the end.
        processes_bounds: the node also runs at timestamps without packets, under the policies Default and Immediate.
        policy: the default input stream handler of the node.
    """

    inputs: Mapping[Port, type] = field(default_factory=dict)
    outputs: Mapping[Port, type] = field(default_factory=dict)
    side_inputs: Mapping[Port, type] = field(default_factory=dict)
    side_outputs: Mapping[Port, type] = field(default_factory=dict)
    optional_side: frozenset[Port] = frozenset()
    propagates_bounds: bool = False
    processes_bounds: bool = False
    policy: str = ""


@dataclass(frozen=True, slots=True)
class DefinitionScope:
    """Server facilities that a node can use while its graph loads.

    Attributes:
        hide_errors: send clients only the type of user exceptions.
        isolation: worker processes for user code, whose tasks run in ``tasks``; None for threads.
        load_text: loads the model of a text-generation node.
        text_api: creates the request parser and response writer of a text-generation node.
        cache_dir: folder for compiled model files.
    """

    graph: str
    directory: Path
    threads: WorkerThreads
    lease: ServableLookup
    hide_errors: bool = False
    isolation: Isolation | None = None
    tasks: trio.Nursery | None = None
    load_text: Callable[[TextModelSpec], Awaitable[TextGenerator]] | None = None
    text_api: Callable[[], TextApiAdapter] | None = None
    cache_dir: Path | None = None


@dataclass(slots=True, eq=False)
class InstanceContext:
    """The call or stream that an instance serves.

    Attributes:
        deadline: on trio's clock.
        is_cancelled: set once, when the client has left, the deadline has passed or another node has failed. Worker
            threads may read it.
        http: the HTTP request, if the graph takes raw HTTP requests.
    """

    graph: str
    parameters: Mapping[str, ParameterValue]
    request_id: str
    deadline: float
    is_cancelled: bool = False
    http: HttpRequest | None = None


class NodeState:
    """The part of a node's state in a running instance that its contexts read."""

    __slots__ = ("config", "context", "side", "side_outputs")

    def __init__(self, config: NodeConfig, context: InstanceContext) -> None:
        self.config = config
        self.context = context
        self.side: Mapping[Port, Any] = {}
        self.side_outputs: dict[Port, Any] = {}


class NodeContext:
    """A calculator's view of one run of its node; created by the engine.

    Attributes:
        timestamp: the timestamp of this run.
        inputs: the values of this run by port, in tag order; a port without a packet is absent.
        settled: the last settled timestamp of each input, including packets of this run. Set only for calculators whose
            contract has ``processes_bounds``.
    """

    __slots__ = ("_run", "bounds", "emitted", "inputs", "is_done", "settled", "timestamp")

    def __init__(
        self, run: NodeState, timestamp: int, inputs: Mapping[Port, Any], settled: Mapping[Port, int] = _NO_BOUNDS
    ) -> None:
        self._run = run
        self.timestamp = timestamp
        self.inputs = inputs
        self.settled = settled
        # The engine reads these after the run.
        self.bounds: Mapping[Port, int] = _NO_BOUNDS
        self.emitted: list[tuple[Port, Packet]] = []
        self.is_done = False

    @property
    def node(self) -> NodeConfig:
        """The node's configuration."""
        return self._run.config

    @property
    def instance(self) -> InstanceContext:
        """The call or stream being served."""
        return self._run.context

    @property
    def side(self) -> Mapping[Port, Any]:
        """The side packets by port."""
        return self._run.side

    def emit(self, port: Port, value: Any, timestamp: int | None = None) -> None:
        """Send a value after this run, at the run's timestamp unless ``timestamp`` is given."""
        self.emitted.append((port, Packet(value, self.timestamp if timestamp is None else timestamp)))

    def advance_bound(self, port: Port, bound: int) -> None:
        """Raise, after this run, the timestamp bound of an output: nothing below ``bound`` will follow."""
        self.bounds = {**self.bounds, port: max(bound, self.bounds.get(port, bound))}

    def close_output(self, port: Port) -> None:
        """Close an output after this run: nothing will follow."""
        self.advance_bound(port, DONE)

    def emit_side(self, port: Port, value: Any) -> None:
        """Set an output side packet; allowed only while the calculator opens."""
        self._run.side_outputs[port] = value


class Calculator(Protocol):
    """A node of a running instance. Runs do not overlap unless ``max_in_flight`` exceeds 1."""

    async def process(self, context: NodeContext) -> None:
        """Process one set of inputs. Cancelled when the instance ends; must stop any work it started.

        Raises:
            ServerError: sent to the client unchanged.
            NodeFailure: sent to the client as an error of the node.
            Exception: any other error; the client gets its type and text as an error of the node.
        """
        ...

    async def close(self, context: NodeContext) -> None:
        """Close the node: all inputs are done, or the instance has failed or was cancelled.

        Called once for every opened calculator. Values emitted here are sent only after a normal end. At a normal end
        it has no time limit and is cancelled with the call; otherwise it is shielded for ``CLOSE_SECONDS``.
        """
        ...


class NodeResources(Protocol):
    """A node of a loaded graph; state shared by its instances."""

    async def open(self, context: NodeContext) -> Calculator:
        """Create the calculator of one instance; ``context`` holds its side packets.

        Raises:
            ServerError: the run cannot start.
        """
        ...

    async def aclose(self) -> None:
        """Release the shared state. Called once, after the last instance has ended; logs errors instead of raising."""
        ...


class CalculatorKind(Protocol):
    """A calculator that graph files can name."""

    name: str

    def contract(self, node: NodeConfig) -> NodeContract:
        """Return the contract of a node.

        Raises:
            ContractError: the node's configuration does not fit this calculator.
        """
        ...

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> NodeResources:
        """Load the state that the node's instances share.

        Raises:
            ConfigError: the node cannot be used.
        """
        ...
