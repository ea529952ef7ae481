"""One run of a graph: a nursery in which each node that has something to do is a task.

::

    push ──> InputStream ──> policy.next ──> calculator.process ──> InputStream of the next node ...
                                                            └────> sink (outputs of the graph)

A node that has nothing to do has no task.  A task that has run its node dry goes on with a node that its packets
have made runnable, so that a chain of nodes costs one task; a call of a graph that is nothing but a chain is run by
its caller's own.  Nothing here waits for time.
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import structlog
import trio

from ovmstrio.core.errors import FailedPrecondition, PayloadTooLarge, ServerError
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.core.tracing import current_span
from ovmstrio.graphs.calculator import NodeFailure
from ovmstrio.graphs.packets import DONE, MIN, Packet, TensorValue, next_allowed
from ovmstrio.graphs.policies import CLOSE, make_policy
from ovmstrio.graphs.requests import DEADLOCK, TIMESTAMP_PARAMETER, graph_failure, node_failure
from ovmstrio.graphs.streams import InputStream, TimestampMismatch, check_timestamp
from ovmstrio.graphs.tensors import contents_of
from ovmstrio.util.truncation import text_of
from pyovms import Tensor as PythonTensor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from ovmstrio.core.request import StreamProblem
    from ovmstrio.graphs.calculator import Calculator, InstanceContext
    from ovmstrio.graphs.graph_config import NodeConfig, Port
    from ovmstrio.graphs.plan import GraphNodePlan, GraphPlan, StreamRoute

__all__ = [
    "CLOSE_SECONDS",
    "GRAPH_VERSION",
    "AllPackets",
    "FirstPackets",
    "GraphInstance",
    "NodeRun",
    "Replies",
    "ResponseMaker",
    "RunContext",
    "Sink",
    "running",
    "to_output",
]

# ----------------------------------------------------------------------
# A node of one running instance: its queues, its policy, and what one run of it sees
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# One run of a graph: a nursery in which each node that has something to do is a task
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

CLOSE_SECONDS: Final = 5.0
"""How long the calculators of an instance that was cut short may take to close."""


class Sink(Protocol):
    """Takes the packets of the graph's outputs."""

    def put(self, output: int, packet: Packet) -> bool:
        """Take a packet of the output with this number; False if no more should come before :meth:`wait_room`."""
        ...

    async def wait_room(self) -> None:
        """Return when there is room for more.  Cancellation: at once; packets taken stay."""
        ...


class GraphInstance:
    """One run of a graph.

    Attributes:
        failure: why the run ended early; the first reason counts.
        is_finished: whether every node has closed, or the run has failed.
    """

    # One is made for every call, so that what only some runs need is made when they need it.

    def __init__(
        self, plan: GraphPlan, context: InstanceContext, sink: Sink, side: Mapping[str, Any] | None = None
    ) -> None:
        self.context = context
        self.failure: ServerError | None = None
        self.is_finished = False
        self._plan = plan
        self._sink = sink
        self._side: dict[str, Any] = dict(side or {})
        self._nodes = [NodeRun(node, context, plan.config.max_queue_size) for node in plan.nodes]
        self._output_bounds = [MIN] * len(plan.outputs)
        self._runnable: deque[NodeRun] = deque()
        self._throttled: list[NodeRun] = []
        self._pushers = 0
        self._workers = 0
        self._open_nodes = 0
        self._inputs_closed = False
        self._finished: trio.Event | None = None
        self._idle: trio.Event | None = None
        self._room: trio.Event | None = None
        self._nursery: trio.Nursery | None = None

    # Life

    async def start(self, nursery: trio.Nursery | None) -> None:
        """Open all nodes; they run in ``nursery`` from now on, or one after the other in :meth:`wait_idle`.

        Raises:
            FailedPrecondition: a side packet is missing.
            ServerError: a node cannot open.

        Cancellation: while a node opens; :meth:`aclose` closes those that have.
        """
        self._nursery = nursery
        for node in self._nodes:
            call = RunContext(node, 0, {})
            node.side = self._side_of(node)
            try:
                node.calculator = await node.plan.resources.open(call)
            except Exception as error:
                raise self._explain(node, "Open", error) from error
            self._open_nodes += 1
            for ref in node.plan.config.side_outputs:
                self._side[ref.name] = node.side_outputs.get(ref.port)
            if not node.streams:
                self._wake(node)

    async def aclose(self) -> None:
        """Close what is still open, whatever has happened; errors are logged, and time is bounded.

        Cancellation: shielded, for at most ``CLOSE_SECONDS``.
        """
        self._finish()
        if not self._open_nodes:
            return
        left = [node for node in self._nodes if node.calculator is not None and not node.is_closed]
        self.context.is_cancelled = True
        deadline = trio.current_time() + CLOSE_SECONDS
        late: list[str] = []
        for node in left:
            node.is_closed = True
            # Each has a scope: those behind one that takes all the time are closed, too, as far as they need not wait.
            with trio.CancelScope(shield=True, deadline=deadline) as scope:
                await self._close_quietly(node)
            if scope.cancelled_caught:
                late.append(node.name)
        if late:
            log.error("graph nodes did not close in time", graph=self.context.graph, nodes=late, seconds=CLOSE_SECONDS)

    def fail(self, error: ServerError) -> None:
        """End the run with this error, unless it has one; everything that runs is cancelled."""
        if self.failure is None:
            self.failure = error
        self.context.is_cancelled = True
        self._finish()
        self._make_room()
        _set(self._idle)
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    # What goes in

    async def push(self, name: str, value: Any, timestamp: int) -> None:
        """Put a packet on an input of the graph; nodes begin to run at :meth:`dispatch`.

        A packet that breaks the order of its stream fails the run.

        Raises:
            trio.BrokenResourceError: the run has failed or ended.

        Cancellation: while the queues that the packet goes to are full.
        """
        route = self._plan.inputs[name]
        while route.consumers and self._is_full(route) and not self.is_finished:
            await self._wait_room()
        if self.is_finished or self._inputs_closed:
            raise trio.BrokenResourceError("the graph takes no more packets")
        try:
            self._check_types(route, value)
            has_room = self._send(route, Packet(value, timestamp))
        except TimestampMismatch as error:
            self.fail(graph_failure(str(error), "INVALID_ARGUMENT"))
            raise trio.BrokenResourceError(str(error)) from error
        if not has_room:
            await self._sink.wait_room()

    def dispatch(self) -> None:
        """Let every node that can run do so, in tasks, if there is a nursery for them."""
        nursery = self._nursery
        if nursery is None:
            return
        while self._runnable:
            self._workers += 1
            nursery.start_soon(self._work, self._runnable.popleft())

    def close_inputs(self) -> None:
        """Say that nothing more will come; nodes run on with what they have, from :meth:`dispatch` on, and close."""
        if self._inputs_closed:
            return
        self._inputs_closed = True
        for route in self._plan.inputs.values():
            self._close_route(route)
        if not self._workers and not self._runnable:
            self._rest()

    # What is waited for

    async def wait_idle(self) -> None:
        """Return when nothing runs or can run.  Runs in the caller's own task what nobody runs yet.

        Cancellation: at any checkpoint of the nodes.
        """
        while self.failure is None:
            if self._runnable:
                self._workers += 1
                await self._work(self._runnable.popleft())
            elif self._workers:
                self._idle = self._idle or trio.Event()
                await self._idle.wait()
            else:
                return

    async def finish(self) -> None:
        """Let everything run, close the inputs, and return once every node has closed or the run has failed.

        Cancellation: at any checkpoint of the nodes.
        """
        await self.wait_idle()
        self.close_inputs()
        await self.wait_idle()
        await self.wait_finished()

    async def wait_finished(self) -> None:
        """Return once every node has closed or the run has failed.  Cancellation: at once; nothing is held."""
        if not self.is_finished:
            self._finished = self._finished or trio.Event()
            await self._finished.wait()

    # Running

    async def _work(self, node: NodeRun) -> None:
        """Run a node dry, then those that it has made runnable."""
        while True:
            await self._advance(node)
            if not self._runnable or self.failure is not None:
                break
            node = self._runnable.popleft()
            self.dispatch()
        self._workers -= 1
        if not self._workers:
            self._rest()

    async def _advance(self, node: NodeRun) -> None:
        node.is_queued = False
        if node.must_close and not node.is_closed:
            await self._close(node)
        while not node.is_closed and node.active < node.max_in_flight and self.failure is None:
            if node.may_throttle and self._is_throttled(node):
                return
            try:
                step = node.policy.next()
            except NodeFailure as error:
                self.fail(self._explain(node, "Process", error))
                return
            if step is None:
                if node.plan.contract.propagates_bounds and not node.active:
                    self._settle(node)
                return
            if step is CLOSE:
                if not node.active:
                    await self._close(node)
                return
            if self._throttled or self._pushers:
                self._make_room()
            await self._process(node, RunContext(node, *step))

    async def _process(self, node: NodeRun, call: RunContext) -> None:
        calculator = node.calculator
        if calculator is None:
            return
        node.active += 1
        if node.active < node.max_in_flight:
            self._wake(node)
        if node.max_in_flight > 1:
            node.pending.append(call)
        if self._runnable:
            self.dispatch()
        tally = node.plan.tally
        begun = tally.begin()
        try:
            span = current_span.get()
            if span is None or not span.is_recorded:
                await calculator.process(call)
            else:
                with span.part(f"node {node.name}", {"ovmstrio.node.calculator": node.plan.config.calculator}):
                    await calculator.process(call)
        except Exception as error:  # noqa: BLE001 - the border of a node: any failure is the run's
            tally.failed(begun)
            self.fail(self._explain(node, "Process", error))
            return
        except BaseException:
            tally.left()
            raise
        tally.succeeded(begun)
        # A run counts until all of it has been delivered, so that the node can neither overtake itself nor close.
        if node.max_in_flight > 1:
            await self._deliver_in_order(node, call)
        else:
            await self._deliver(node, call)
            node.active -= 1

    async def _deliver_in_order(self, node: NodeRun, call: RunContext) -> None:
        """Deliver what has been done in the order in which it was begun, one task at a time."""
        call.is_done = True
        if node.is_delivering:
            return
        node.is_delivering = True
        while node.pending and node.pending[0].is_done and self.failure is None:
            await self._deliver(node, node.pending.popleft())
            node.active -= 1
        node.is_delivering = False

    async def _deliver(self, node: NodeRun, call: RunContext) -> None:
        emitted = call.emitted
        if len(emitted) > 1:
            emitted.sort(key=_by_port)
        has_room = True
        try:
            for port, packet in emitted:
                node.check_output(port, packet.value)
                has_room &= self._send(node.plan.routes[port], packet)
        except Exception as error:  # noqa: BLE001 - as above: what a node emits is its own
            self.fail(self._explain(node, "Process", error))
            return
        if node.plan.contract.propagates_bounds and call.timestamp < DONE:
            self._advance_bounds(node, next_allowed(call.timestamp))
        for port, bound in call.bounds.items():
            self._advance_route(node.plan.routes[port], bound)
        if not has_room:
            await self._sink.wait_room()

    def _send(self, route: StreamRoute, packet: Packet) -> bool:
        """Put a packet where its stream leads; False if the outputs of the graph have no room for more."""
        route.tally.passed += 1
        for consumer in route.consumers:
            target = self._nodes[consumer.node]
            if not target.is_closed:
                target.streams[consumer.slot].push(packet)
                self._wake(target)
        has_room = True
        for output in route.outputs:
            bound = self._output_bounds[output]
            if packet.timestamp < bound:
                check_timestamp(route.stream, packet.timestamp, bound)
            self._output_bounds[output] = next_allowed(packet.timestamp)
            has_room &= self._sink.put(output, packet)
        return has_room

    def _settle(self, node: NodeRun) -> None:
        """Pass on what is settled about a node's inputs, although nothing came at those timestamps."""
        bound = node.policy.bound()
        if bound < DONE:
            self._advance_bounds(node, bound)

    def _advance_bounds(self, node: NodeRun, bound: int) -> None:
        for route in node.plan.routes.values():
            self._advance_route(route, bound)

    def _advance_route(self, route: StreamRoute, bound: int) -> None:
        for consumer in route.consumers:
            target = self._nodes[consumer.node]
            if target.streams[consumer.slot].advance(bound):
                self._wake(target)
        for output in route.outputs:
            self._output_bounds[output] = max(self._output_bounds[output], bound)

    def _wake(self, node: NodeRun) -> None:
        if node.is_closed:
            return
        node.policy.arrived()
        if not node.is_queued and node.active < node.max_in_flight:
            node.is_queued = True
            self._runnable.append(node)

    # Ending

    async def _close(self, node: NodeRun) -> None:
        """Close a node whose inputs are done, and with it what it feeds."""
        node.is_closed = True
        call = RunContext(node, DONE, {})
        if node.calculator is not None:
            try:
                await node.calculator.close(call)
            except Exception as error:  # noqa: BLE001 - the border of a node, as in _process
                self.fail(self._explain(node, "Close", error))
                return
        if call.emitted:
            await self._deliver(node, call)
        for route in node.plan.routes.values():
            self._close_route(route)
        self._open_nodes -= 1
        if not self._open_nodes:
            self._finish()
            self._make_room()

    async def _close_quietly(self, node: NodeRun) -> None:
        if node.calculator is None:
            return
        try:
            await node.calculator.close(RunContext(node, DONE, {}))
        except Exception as error:
            log.exception(
                "graph node failed to close", servable=self.context.graph, node=node.name, error=text_of(error)
            )

    def _close_route(self, route: StreamRoute) -> None:
        for consumer in route.consumers:
            target = self._nodes[consumer.node]
            target.streams[consumer.slot].close()
            self._wake(target)

    def _rest(self) -> None:
        """Nothing runs: end waits that only a run could have ended, and nodes that only they themselves feed."""
        if self.failure is None:
            if self._throttled or self._pushers:
                self._resolve_deadlock()
            elif self._inputs_closed and not self.is_finished:
                self._close_cycle()
        if not self._workers and self._idle is not None:
            self._idle.set()
            self._idle = None

    def _finish(self) -> None:
        self.is_finished = True
        _set(self._finished)

    def _close_cycle(self) -> None:
        """Close the first node that waits for nothing but back edges, or else the first that is open."""
        left = [node for node in self._nodes if not node.is_closed]
        if not left:
            self._finish()
            return
        stuck = next((node for node in left if node.waits_for_itself), left[0])
        stuck.must_close = stuck.is_queued = True
        self._runnable.append(stuck)
        self.dispatch()

    # Back-pressure

    def _is_full(self, route: StreamRoute) -> bool:
        for consumer in route.consumers:  # noqa: SIM110 - a generator costs more than all the rest of a push
            if self._nodes[consumer.node].blocks(consumer.slot):
                return True
        return False

    def _is_throttled(self, node: NodeRun) -> bool:
        if not any(self._is_full(route) for route in node.plan.routes.values()):
            return False
        if node not in self._throttled:
            self._throttled.append(node)
        return True

    def _make_room(self) -> None:
        """Packets have been taken off queues: let whoever waits for room look again."""
        throttled, self._throttled = self._throttled, []
        for waiting in throttled:
            self._wake(waiting)
        if self._room is not None:
            self._room.set()
            self._room = None

    async def _wait_room(self) -> None:
        self._pushers += 1
        try:
            self.dispatch()
            room = self._room = self._room or trio.Event()
            if not self._workers:
                self._rest()
            await room.wait()
        finally:
            self._pushers -= 1

    def _resolve_deadlock(self) -> None:
        """Everyone waits for room: give each full queue one place more, as MediaPipe does."""
        if self._plan.config.report_deadlock:
            self.fail(graph_failure(DEADLOCK, "UNAVAILABLE"))
            return
        for node in self._nodes:
            node.grow_full_queues()
        self._make_room()
        self.dispatch()

    # Words

    def _side_of(self, node: NodeRun) -> dict[Port, Any]:
        optional = node.plan.contract.optional_side
        missing = [ref for ref in node.plan.config.side_inputs if ref.name not in self._side]
        for ref in missing:
            if ref.port not in optional:
                raise FailedPrecondition(
                    f'Failed to start mediapipe graph - Side packet "{ref.name}" is required but was not provided.'
                )
        return {ref.port: self._side[ref.name] for ref in node.plan.config.side_inputs if ref not in missing}

    def _check_types(self, route: StreamRoute, value: Any) -> None:
        for consumer in route.consumers:
            if not isinstance(value, consumer.type):
                self.fail(
                    graph_failure(
                        f'Packet type mismatch on a calculator receiving from stream "{route.stream}": expected '
                        f"{consumer.type.__name__}, got {type(value).__name__}; the tag of the graph's input stream "
                        "decides what is made of a request"
                    )
                )
                raise trio.BrokenResourceError(route.stream)

    def _explain(self, node: NodeRun, phase: str, error: Exception) -> ServerError:
        explained = node_failure(node.name, phase, error)
        explained.node = node.name
        log.error(
            "graph node failed",
            graph=self.context.graph,
            node=node.name,
            phase=phase,
            request_id=self.context.request_id,
            reason=explained.message,
            exc_info=error if node.is_unforeseen(error) else None,
        )
        return explained


def _set(event: trio.Event | None) -> None:
    if event is not None:
        event.set()


def _by_port(emitted: tuple[Any, Packet]) -> Any:
    return emitted[0]


@asynccontextmanager
async def running(instance: GraphInstance) -> AsyncIterator[None]:
    """Run an instance in a nursery around a block, whose end ends it.

    ``instance.failure`` says then whether it has failed.

    Raises:
        Exception: what the block raised, or what kept the instance from starting.

    Ownership: the instance; all its nodes are closed when this is left.

    Cancellation: at any checkpoint; everything that runs is cancelled and closed.
    """
    problem: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                await instance.start(nursery)
                yield
            except Exception as error:  # noqa: BLE001 - kept from becoming a group, and raised below
                problem = error
            if problem is not None or not instance.is_finished:
                instance.context.is_cancelled = True
                nursery.cancel_scope.cancel()
    finally:
        await instance.aclose()
    if problem is not None and instance.failure is None:
        raise problem


# ----------------------------------------------------------------------
# Where the outputs of an instance go: the first packet of each, or all, for a call; every one at once for a stream
# ----------------------------------------------------------------------

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
