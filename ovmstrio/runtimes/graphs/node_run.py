"""A node of one running instance: its queues, its policy, and what one run of it sees."""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ServerError
from ovmstrio.runtimes.graphs.calculator import NodeFailure
from ovmstrio.runtimes.graphs.input_streams import InputStream, TimestampMismatch
from ovmstrio.runtimes.graphs.packets import Packet
from ovmstrio.runtimes.graphs.policies import make_policy
from ovmstrio.runtimes.graphs.timestamps import DONE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.runtimes.graphs.calculator import Calculator, InstanceContext
    from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
    from ovmstrio.runtimes.graphs.graph_plan import GraphNodePlan

__all__ = ["NodeRun", "RunContext"]

_NO_BOUNDS: Final[Mapping[Port, int]] = MappingProxyType({})


class NodeRun:
    """The state of one node.

    Attributes:
        active: runs begun and not yet delivered, at most ``max_in_flight``.
        is_queued: whether it stands among the nodes that can run.
        may_throttle: whether queues that it feeds have a bound.
        must_close: whether it is to be closed although inputs are open, for nothing else can end it.
        pending: runs begun and not delivered, in order, where several may be under way.
    """

    __slots__ = (
        "active",
        "calculator",
        "context",
        "is_closed",
        "is_delivering",
        "is_queued",
        "max_in_flight",
        "may_throttle",
        "must_close",
        "name",
        "pending",
        "plan",
        "policy",
        "side",
        "side_outputs",
        "streams",
    )

    def __init__(self, plan: GraphNodePlan, context: InstanceContext, max_queue_size: int) -> None:
        config = plan.config
        self.plan = plan
        self.context = context
        self.name = config.canonical_name
        self.streams = [
            InputStream(ref.name, ref.port, limit=max_queue_size, is_back_edge=ref.port in config.back_edges)
            for ref in plan.inputs
        ]
        self.policy = make_policy(plan.policy, self.streams, processes_bounds=plan.contract.processes_bounds)
        self.calculator: Calculator | None = None
        self.side: Mapping[Port, Any] = {}
        self.side_outputs: dict[Port, Any] = {}
        self.max_in_flight = max(1, config.max_in_flight)
        self.active = 0
        self.is_queued = False
        self.is_closed = False
        self.must_close = False
        self.is_delivering = False
        self.pending: deque[RunContext] = deque()
        self.may_throttle = max_queue_size >= 0 and any(route.consumers for route in plan.routes.values())

    def blocks(self, slot: int) -> bool:
        """Tell whether whoever feeds this input has to wait; back edges never hold up their own node."""
        stream = self.streams[slot]
        return stream.is_full and not stream.is_back_edge and not self.is_closed

    def grow_full_queues(self) -> None:
        """Give each queue that is full one place more."""
        for stream in self.streams:
            if stream.is_full:
                stream.limit += 1

    @property
    def waits_for_itself(self) -> bool:
        """Whether every input but the back edges is done."""
        return all(stream.is_done for stream in self.streams if not stream.is_back_edge)

    def check_output(self, port: Port, value: Any) -> None:
        """Check that a value may go out where it is sent.

        Raises:
            NodeFailure: there is no such output, or it carries something else.
        """
        if port not in self.plan.routes:
            raise NodeFailure(f"there is no output {port}; the node has {', '.join(map(str, self.plan.routes))}")
        wanted = self.plan.contract.outputs.get(port, object)
        if not isinstance(value, wanted):
            stream = self.plan.routes[port].stream
            raise NodeFailure(
                f'Packet type mismatch on a calculator outputting to stream "{stream}": expected {wanted.__name__}, '
                f"got {type(value).__name__}"
            )

    def is_unforeseen(self, error: Exception) -> bool:
        """Whether an error has a traceback that nobody has logged."""
        return not isinstance(error, ServerError | NodeFailure | TimestampMismatch)


class RunContext:
    """What a calculator sees in one run; the engine's ``NodeContext``."""

    __slots__ = ("_run", "bounds", "emitted", "inputs", "is_done", "settled", "timestamp")

    def __init__(
        self,
        run: NodeRun,
        timestamp: int,
        inputs: Mapping[Port, Any],
        settled: Mapping[Port, int] = _NO_BOUNDS,
    ) -> None:
        self._run = run
        self.timestamp = timestamp
        self.inputs = inputs
        self.settled = settled
        self.bounds: Mapping[Port, int] = _NO_BOUNDS
        self.emitted: list[tuple[Port, Packet]] = []
        self.is_done = False

    @property
    def node(self) -> NodeConfig:
        """The node as the file has it."""
        return self._run.plan.config

    @property
    def instance(self) -> InstanceContext:
        """The call or stream that is served."""
        return self._run.context

    @property
    def side(self) -> Mapping[Port, Any]:
        """The side packets by port."""
        return self._run.side

    def emit(self, port: Port, value: Any, timestamp: int | None = None) -> None:
        """Send a value when this run has ended, at the run's own timestamp unless another is given."""
        self.emitted.append((port, Packet(value, self.timestamp if timestamp is None else timestamp)))

    def advance_bound(self, port: Port, bound: int) -> None:
        """Promise, when this run has ended, that nothing below ``bound`` comes on an output any more."""
        self.bounds = {**self.bounds, port: max(bound, self.bounds.get(port, bound))}

    def close_output(self, port: Port) -> None:
        """Say, when this run has ended, that nothing more comes on an output."""
        self.advance_bound(port, DONE)

    def emit_side(self, port: Port, value: Any) -> None:
        """Give an output side packet; only while the calculator opens."""
        self._run.side_outputs[port] = value
