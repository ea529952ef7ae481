"""The port between the engine and what nodes do.

::

    CalculatorKind   one for a registered name    contract(node), load(node, scope) -> NodeResources
    NodeResources    one for a node of a loaded graph    open(context) -> Calculator; aclose()
    Calculator       one for a node of a running instance    process(context); close(context)

Third parties register kinds through the entry-point group ``ovmstrio.calculators``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ovmstrio.graphs.graph_config import NodeConfig, Port

if TYPE_CHECKING:
    import trio

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.http import HttpRequest
    from ovmstrio.core.request import ParameterValue
    from ovmstrio.core.service import LeaseServable, TextApi
    from ovmstrio.isolation.isolated_code import Isolation
    from ovmstrio.isolation.thread_pool import WorkerThreads

__all__ = [
    "Calculator",
    "CalculatorKind",
    "ContractError",
    "DefinitionScope",
    "InstanceContext",
    "NodeContext",
    "NodeContract",
    "NodeFailure",
    "NodeResources",
]


class ContractError(Exception):
    """A node is not written as its calculator needs it; ``fix`` is the way out, where one is known.

    ``code`` is the absl status that MediaPipe would give, such as ``INVALID_ARGUMENT``.
    """

    def __init__(self, message: str, *, fix: str = "", code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.code = code


class NodeFailure(Exception):
    """A node failed on this input.

    ``message`` is what the client is told after the node's name, ``code`` the absl status in front of it.
    """

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True, slots=True)
class NodeContract:
    """What the streams and side packets of a node carry, by port; ``object`` is anything.

    ``propagates_bounds``: a run that emits nothing on an output tells whoever is downstream that nothing will come at
    that timestamp (MediaPipe's timestamp offset 0).  Without it they wait for a later packet or the end.
    ``side_outputs`` are made by :meth:`NodeResources.open`; ``optional_side`` are inputs that the node can do without.
    ``policy`` names the input stream handler of nodes for which the file names none.
    ``processes_bounds``: the node runs also at timestamps at which it has become certain that no packet comes, under
    the policies Default and Immediate.
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
    """What a node may use of the server while its graph is loaded.

    ``hide_errors``: clients are told only the type of what user code raises.
    ``isolation``: how code of users is run in processes of its own, whose tasks are in ``tasks``; None for threads.
    ``load_text``: loads the model of a node that makes text, and ``text_api`` makes what reads and writes for it;
    ``cache_dir`` is where what is made of its files is kept.
    """

    graph: str
    directory: Path
    threads: WorkerThreads
    lease: LeaseServable
    hide_errors: bool = False
    isolation: Isolation | None = None
    tasks: trio.Nursery | None = None
    load_text: Callable[[TextModelSpec], Awaitable[TextGenerator]] | None = None
    text_api: Callable[[], TextApi] | None = None
    cache_dir: Path | None = None


@dataclass(slots=True, eq=False)
class InstanceContext:
    """What the nodes of one instance know of the call or stream that they serve.

    ``http`` is the request that came whole over HTTP, where one did.  ``deadline`` is on trio's clock.
    ``is_cancelled`` turns true once, when the client has left, the deadline has passed or another node has failed;
    worker threads may read it.
    """

    graph: str
    parameters: Mapping[str, ParameterValue]
    request_id: str
    deadline: float
    is_cancelled: bool = False
    http: HttpRequest | None = None


class NodeContext(Protocol):
    """What a calculator sees while it runs."""

    @property
    def node(self) -> NodeConfig:
        """The node as the file has it."""
        ...

    @property
    def instance(self) -> InstanceContext:
        """The call or stream that is served."""
        ...

    @property
    def side(self) -> Mapping[Port, Any]:
        """The side packets by port."""
        ...

    @property
    def timestamp(self) -> int:
        """The timestamp of this run."""
        ...

    @property
    def inputs(self) -> Mapping[Port, Any]:
        """The values of this run by port, in the order of tags; a port where no packet came is absent."""
        ...

    @property
    def settled(self) -> Mapping[Port, int]:
        """By port, the last timestamp at which the input is known, packets of this run included.

        Only calculators whose contract says ``processes_bounds`` are told.
        """
        ...

    def emit(self, port: Port, value: Any, timestamp: int | None = None) -> None:
        """Send a value when this run has ended, at the run's own timestamp unless another is given."""
        ...

    def advance_bound(self, port: Port, bound: int) -> None:
        """Promise, when this run has ended, that nothing below ``bound`` comes on an output any more."""
        ...

    def close_output(self, port: Port) -> None:
        """Say, when this run has ended, that nothing more comes on an output."""
        ...

    def emit_side(self, port: Port, value: Any) -> None:
        """Give an output side packet; only while the calculator opens."""
        ...


class Calculator(Protocol):
    """A node of one running instance.  The engine runs it one call at a time (unless ``max_in_flight`` says more)."""

    async def process(self, context: NodeContext) -> None:
        """Handle one set of inputs.

        Raises:
            ServerError: its own class and text reach the client.
            NodeFailure: a failure with a text made for the client.
            Exception: anything else is reported as an error of the node by type and text.

        Cancellation: when the instance ends; whatever runs must be told to stop.
        """
        ...

    async def close(self, context: NodeContext) -> None:
        """End: all inputs are done, or the instance has failed or was cancelled.

        Called once for every calculator that was opened, shielded, with the engine's bound on its time.  What it
        emits is sent on only after a normal end.
        """
        ...


class NodeResources(Protocol):
    """A node of a loaded graph: what its instances share."""

    async def open(self, context: NodeContext) -> Calculator:
        """Make the calculator of one instance; ``context`` holds its side packets.

        Raises:
            ServerError: the run cannot start.
        """
        ...

    async def aclose(self) -> None:
        """Give back what is shared; called once, when no instance is left.  Raises nothing; errors are logged."""
        ...


class CalculatorKind(Protocol):
    """A calculator that graph files may name."""

    name: str

    def contract(self, node: NodeConfig) -> NodeContract:
        """Say what a node's streams carry.

        Raises:
            ContractError: the node is not written as this calculator needs it.
        """
        ...

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> NodeResources:
        """Make what the node's instances share.

        Raises:
            ConfigError: the node cannot be used.
        """
        ...
