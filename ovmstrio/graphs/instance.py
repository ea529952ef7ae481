"""Execution of one call or stream of a graph: a nursery with a task for each node that has work.

::

    push ──> InputStream ──> policy.next ──> calculator.process ──> InputStream of the next node ...
                                                            └────> sink (outputs of the graph)

A node without work has no task. A task whose node has run out of packets continues with a node that became runnable,
so a chain of nodes costs one task. A graph that is a chain runs in the caller's task. Nothing here waits for time.
"""

from __future__ import annotations

from bisect import bisect_right, insort_right
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import structlog
import trio

from ovmstrio.core.errors import FailedPrecondition, PayloadTooLarge, ServerError
from ovmstrio.core.request import ENABLE_FINAL_RESPONSE, FINAL_RESPONSE, InferResponse, StreamProblem
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.core.tracing import current_span
from ovmstrio.graphs.calculator import NodeContext, NodeFailure, NodeState
from ovmstrio.graphs.packets import DONE, MIN, Packet, TensorValue, next_allowed
from ovmstrio.graphs.policies import CLOSE, create_policy
from ovmstrio.graphs.python_nodes.api import Tensor as PythonTensor
from ovmstrio.graphs.requests import DEADLOCK_MESSAGE, TIMESTAMP_PARAMETER, graph_failure, node_failure
from ovmstrio.graphs.streams import InputStream, TimestampMismatch, check_timestamp
from ovmstrio.graphs.tensors import tensor_bytes
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence

    from ovmstrio.core.request import InferRequest, ParameterValue
    from ovmstrio.graphs.calculator import Calculator, InstanceContext
    from ovmstrio.graphs.graph_config import Port
    from ovmstrio.graphs.plan import GraphNodePlan, GraphPlan, StreamRoute

# Nodes of a running instance


class NodeRun(NodeState):
    """State of one node in a running instance.

    Attributes:
        active: runs started and not yet delivered, at most ``max_in_flight``.
        is_queued: whether the node is in the list of runnable nodes.
        can_throttle: whether the node feeds a bounded queue.
        is_close_forced: whether the node must close although inputs are open, because only its own output feeds it.
        pending: runs started and not yet delivered, in order; used only if ``max_in_flight`` exceeds 1.
    """

    __slots__ = (
        "active",
        "calculator",
        "can_throttle",
        "is_close_forced",
        "is_closed",
        "is_delivering",
        "is_queued",
        "max_in_flight",
        "name",
        "pending",
        "plan",
        "policy",
        "streams",
    )

    def __init__(
        self, plan: GraphNodePlan, context: InstanceContext, max_queue_size: int, graph_inputs: Container[str]
    ) -> None:
        config = plan.config
        super().__init__(config, context)
        self.plan = plan
        self.name = config.canonical_name
        self.streams = [
            InputStream(
                ref.name,
                ref.port,
                limit=max_queue_size,
                is_back_edge=ref.port in config.back_edges,
                is_graph_input=ref.name in graph_inputs,
            )
            for ref in plan.inputs
        ]
        self.policy = create_policy(plan.policy, self.streams, processes_bounds=plan.contract.processes_bounds)
        self.calculator: Calculator | None = None
        self.max_in_flight = max(1, config.max_in_flight)
        self.active = 0
        self.is_queued = False
        self.is_closed = False
        self.is_close_forced = False
        self.is_delivering = False
        self.pending: deque[NodeContext] = deque()
        self.can_throttle = max_queue_size >= 0 and any(route.consumers for route in plan.routes.values())

    def blocks(self, slot: int) -> bool:
        """Return whether the producer of this input must wait; a back edge never blocks its own node."""
        stream = self.streams[slot]
        return stream.is_full and not stream.is_back_edge and not self.is_closed

    @property
    def waits_for_back_edges(self) -> bool:
        """True if every input except back edges is done."""
        return all(stream.is_done for stream in self.streams if not stream.is_back_edge)

    def route_of(self, port: Port) -> StreamRoute:
        """Return the route of an output."""
        route = self.plan.routes.get(port)
        if route is None:
            raise NodeFailure(f"there is no output {port}; the node has {', '.join(map(str, self.plan.routes))}")
        return route

    def check_output(self, port: Port, value: Any) -> None:
        """Check that the contract allows a value on an output."""
        route = self.route_of(port)
        wanted = self.plan.contract.outputs.get(port, object)
        if not isinstance(value, wanted):
            raise NodeFailure(
                f'Packet type mismatch on a calculator outputting to stream "{route.stream}": expected '
                f"{wanted.__name__}, got {type(value).__name__}"
            )


# Instances

log = structlog.get_logger(__name__)

CLOSE_SECONDS: Final = 5.0
"""Time limit for closing the calculators of an interrupted instance."""


class OutputSink(Protocol):
    """Receiver of the packets on the graph's outputs."""

    def put(self, output: int, packet: Packet) -> bool:
        """Accept a packet of an output; False if the caller must call :meth:`wait_room` before the next one."""
        ...

    async def wait_room(self) -> None:
        """Wait until more packets can be accepted."""
        ...


class GraphInstance:
    """One execution of a graph.

    Attributes:
        failure: the first error that ended the execution early.
        is_finished: whether every node has closed or the execution has failed.
        on_idle: called when no node runs or can run.
        output_bounds: the lowest possible timestamp of the next packet, by output.
    """

    # Every call creates one instance, so optional parts (events) are created on demand.

    def __init__(
        self, plan: GraphPlan, context: InstanceContext, sink: OutputSink, side: Mapping[str, Any] | None = None
    ) -> None:
        self.context = context
        self.failure: ServerError | None = None
        self.is_finished = False
        self.on_idle: Callable[[], None] | None = None
        self.output_bounds = [MIN] * len(plan.outputs)
        self._plan = plan
        self._sink = sink
        self._side: dict[str, Any] = dict(side or {})
        self._nodes = [NodeRun(node, context, plan.config.max_queue_size, plan.inputs) for node in plan.nodes]
        self._runnable: deque[NodeRun] = deque()
        self._throttled: list[NodeRun] = []
        self._pushers: list[StreamRoute] = []
        self._workers = 0
        self._open_nodes = 0
        self._inputs_closed = False
        self._finished: trio.Event | None = None
        self._idle: trio.Event | None = None
        self._room: trio.Event | None = None
        self._nursery: trio.Nursery | None = None

    # Life

    async def start(self, nursery: trio.Nursery | None) -> None:
        """Open all nodes, which then run in ``nursery`` or, without one, one at a time in :meth:`wait_idle`.

        Raises:
            FailedPrecondition: a required side packet is missing.
            ServerError: a node cannot open. :meth:`aclose` closes the nodes that did open.
        """
        self._nursery = nursery
        for node in self._nodes:
            call = NodeContext(node, 0, {})
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
        """Close all open nodes and log their errors. Shielded from cancellation for at most ``CLOSE_SECONDS``."""
        self._finish()
        if not self._open_nodes:
            return
        left = [node for node in self._nodes if node.calculator is not None and not node.is_closed]
        self.context.is_cancelled = True
        deadline = trio.current_time() + CLOSE_SECONDS
        late: list[str] = []
        for node in left:
            node.is_closed = True
            # One scope per node: after a node that used up the time, the others still close if they need not wait.
            with trio.CancelScope(shield=True, deadline=deadline) as scope:
                await self._close_quietly(node)
            if scope.cancelled_caught:
                late.append(node.name)
        if late:
            log.error("graph nodes did not close in time", graph=self.context.graph, nodes=late, seconds=CLOSE_SECONDS)

    def fail(self, error: ServerError) -> None:
        """Stop the instance with an error; the first error wins. Cancels all running nodes."""
        if self.failure is None:
            self.failure = error
        self.context.is_cancelled = True
        self._finish()
        self._make_room()
        _set(self._idle)
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    # Inputs

    async def push(self, name: str, value: Any, timestamp: int) -> None:
        """Put a packet on a graph input and wait while the queues of its consumers are full.

        Nodes start running at :meth:`dispatch`. A packet that breaks the timestamp order fails the instance.

        Raises:
            trio.BrokenResourceError: the instance has failed or ended.
        """
        route = self._plan.inputs[name]
        while route.consumers and self._is_full(route) and not self.is_finished:
            await self._wait_room(route)
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
        """Start a task for each runnable node, if the instance has a nursery and has not ended."""
        nursery = self._nursery
        if nursery is None or self.is_finished:
            return
        while self._runnable:
            self._workers += 1
            nursery.start_soon(self._work, self._runnable.popleft())

    def close_inputs(self) -> None:
        """Close the graph inputs. From :meth:`dispatch` on, nodes process the packets they have and then close."""
        if self._inputs_closed:
            return
        self._inputs_closed = True
        for route in self._plan.inputs.values():
            self._close_route(route)
        if not self._workers and not self._runnable:
            self._on_idle()

    # Waiting

    async def wait_idle(self) -> None:
        """Wait until no node runs or can run; nodes without a task run in the caller's task."""
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
        """Process all packets, close the inputs, and wait until every node has closed or the instance has failed."""
        await self.wait_idle()
        self.close_inputs()
        await self.wait_idle()
        await self.wait_finished()

    async def wait_finished(self) -> None:
        """Wait until every node has closed or the instance has failed."""
        if not self.is_finished:
            self._finished = self._finished or trio.Event()
            await self._finished.wait()

    # Running

    async def _work(self, node: NodeRun) -> None:
        """Run a node until it has no packets, then the nodes that became runnable."""
        while True:
            try:
                await self._advance(node)
            except Exception as error:  # noqa: BLE001 - reported to the client and in the log like a failure of the node
                self.fail(self._explain(node, "Process", error))
            if not self._runnable or self.failure is not None:
                break
            node = self._runnable.popleft()
            self.dispatch()
        self._workers -= 1
        if not self._workers:
            self._on_idle()

    async def _advance(self, node: NodeRun) -> None:
        node.is_queued = False
        if node.is_close_forced and not node.is_closed:
            await self._close(node)
        while not node.is_closed and node.active < node.max_in_flight and self.failure is None:
            if node.can_throttle and self._is_throttled(node):
                return
            try:
                step = node.policy.next()
            except NodeFailure as error:
                self.fail(self._explain(node, "Process", error))
                return
            if step is None:
                if node.plan.contract.propagates_bounds and not node.active:
                    self._propagate_bound(node)
                return
            if step is CLOSE:
                if not node.active:
                    await self._close(node)
                return
            if self._throttled or self._pushers:
                self._make_room()
            await self._process(node, NodeContext(node, *step))

    async def _process(self, node: NodeRun, call: NodeContext) -> None:
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
        except Exception as error:  # noqa: BLE001 - any failure of a node fails the instance
            tally.failed(begun)
            self.fail(self._explain(node, "Process", error))
            return
        except BaseException:
            tally.left()
            raise
        tally.succeeded(begun)
        # A run is active until it is fully delivered, so that runs stay in order and the node does not close early.
        if node.max_in_flight > 1:
            await self._deliver_in_order(node, call)
        else:
            await self._deliver(node, call)
            node.active -= 1

    async def _deliver_in_order(self, node: NodeRun, call: NodeContext) -> None:
        """Deliver finished runs in the order in which they started, one task at a time."""
        call.is_done = True
        if node.is_delivering:
            return
        node.is_delivering = True
        while node.pending and node.pending[0].is_done and self.failure is None:
            await self._deliver(node, node.pending.popleft())
            node.active -= 1
        node.is_delivering = False

    async def _deliver(self, node: NodeRun, call: NodeContext) -> None:
        emitted = call.emitted
        if len(emitted) > 1:
            emitted.sort(key=itemgetter(0))
        has_room = True
        try:
            for port, packet in emitted:
                node.check_output(port, packet.value)
                has_room &= self._send(node.plan.routes[port], packet)
            if node.plan.contract.propagates_bounds and call.timestamp < DONE:
                self._advance_bounds(node, next_allowed(call.timestamp))
            for port, bound in call.bounds.items():
                self._advance_route(node.route_of(port), bound)
        except Exception as error:  # noqa: BLE001 - the node is at fault for what it emits
            self.fail(self._explain(node, "Process", error))
            return
        if not has_room:
            await self._sink.wait_room()

    def _send(self, route: StreamRoute, packet: Packet) -> bool:
        """Put a packet on its stream; False if the graph's sink has no room for more."""
        route.tally.passed += 1
        for consumer in route.consumers:
            target = self._nodes[consumer.node]
            if not target.is_closed:
                target.streams[consumer.slot].push(packet)
                self._wake(target)
        has_room = True
        for output in route.outputs:
            bound = self.output_bounds[output]
            if packet.timestamp < bound:
                check_timestamp(route.stream, packet.timestamp, bound)
            self.output_bounds[output] = next_allowed(packet.timestamp)
            has_room &= self._sink.put(output, packet)
        return has_room

    def _propagate_bound(self, node: NodeRun) -> None:
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
            self.output_bounds[output] = max(self.output_bounds[output], bound)

    def _wake(self, node: NodeRun) -> None:
        if node.is_closed:
            return
        node.policy.arrived()
        if not node.is_queued and node.active < node.max_in_flight:
            node.is_queued = True
            self._runnable.append(node)

    # Ending

    async def _close(self, node: NodeRun) -> None:
        """Close a node whose inputs are done, and the streams it feeds."""
        node.is_closed = True
        call = NodeContext(node, DONE, {})
        if node.calculator is not None:
            try:
                await node.calculator.close(call)
            except Exception as error:  # noqa: BLE001 - any failure of a node fails the instance
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
            await node.calculator.close(NodeContext(node, DONE, {}))
        except Exception as error:
            log.exception(
                "graph node failed to close", servable=self.context.graph, node=node.name, error=text_of(error)
            )

    def _close_route(self, route: StreamRoute) -> None:
        for consumer in route.consumers:
            target = self._nodes[consumer.node]
            target.streams[consumer.slot].close()
            self._wake(target)

    def _on_idle(self) -> None:
        """Resolve a deadlock or close a cycle if needed, then wake :meth:`wait_idle`. Called when no node runs."""
        if self.failure is None:
            if self._throttled or self._pushers:
                self._continue_producers()
            elif self._inputs_closed and not self.is_finished:
                self._close_cycle()
        if self.is_idle and self.on_idle is not None:
            self.on_idle()
        if not self._workers and self._idle is not None:
            self._idle.set()
            self._idle = None

    @property
    def is_idle(self) -> bool:
        """State in which no node runs or can run, and no packet waits for room."""
        return not (self._workers or self._runnable or self._pushers or self.failure)

    def _finish(self) -> None:
        self.is_finished = True
        _set(self._finished)

    def _close_cycle(self) -> None:
        """Close the first node that waits only for back edges, else the first open node."""
        left = [node for node in self._nodes if not node.is_closed]
        if not left:
            self._finish()
            return
        stuck = next((node for node in left if node.waits_for_back_edges), left[0])
        stuck.is_close_forced = stuck.is_queued = True
        self._runnable.append(stuck)
        self.dispatch()

    # Back-pressure

    def _is_full(self, route: StreamRoute) -> bool:
        for consumer in route.consumers:  # noqa: SIM110 - a generator costs more than all the rest of a push
            if self._nodes[consumer.node].blocks(consumer.slot):
                return True
        return False

    def _must_wait(self, node: NodeRun) -> bool:
        return any(self._is_full(route) for route in node.plan.routes.values())

    def _is_throttled(self, node: NodeRun) -> bool:
        if not self._must_wait(node):
            return False
        if node not in self._throttled:
            self._throttled.append(node)
        return True

    def _make_room(self) -> None:
        """Wake throttled nodes and waiting producers after packets have left queues."""
        throttled, self._throttled = self._throttled, []
        for waiting in throttled:
            self._wake(waiting)
        if self._room is not None:
            self._room.set()
            self._room = None

    async def _wait_room(self, route: StreamRoute) -> None:
        self._pushers.append(route)
        try:
            self.dispatch()
            room = self._room = self._room or trio.Event()
            if not self._workers:
                self._on_idle()
            await room.wait()
        finally:
            self._pushers.remove(route)

    def _continue_producers(self) -> None:
        """Wake producers that have room because packets were dropped; if there are none, resolve the deadlock."""
        if not all(map(self._must_wait, self._throttled)):
            self._make_room()
            self.dispatch()
        elif self._inputs_closed or all(map(self._is_full, self._pushers)):
            self._resolve_deadlock()
        elif self._room is not None:
            # Without the event, these producers are awake already.
            self._make_room()
            self.dispatch()

    def _resolve_deadlock(self) -> None:
        """Grow each full queue by one place, as MediaPipe does, or fail if the graph has ``report_deadlock``."""
        if self._plan.config.report_deadlock:
            self.fail(graph_failure(DEADLOCK_MESSAGE, "UNAVAILABLE"))
            return
        for stream in (stream for node in self._nodes for stream in node.streams):
            if stream.is_full:
                stream.limit += 1
        self._make_room()
        self.dispatch()

    # Checks and errors

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
                        "sets the packet type"
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
            exc_info=None if isinstance(error, ServerError | NodeFailure | TimestampMismatch) else error,
        )
        return explained


def _set(event: trio.Event | None) -> None:
    if event is not None:
        event.set()


@asynccontextmanager
async def run_instance(instance: GraphInstance) -> AsyncIterator[None]:
    """Run an instance in a nursery around a block, and stop the instance and close all nodes when the block ends.

    ``instance.failure`` holds the error of a failed run.
    """
    problem: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                await instance.start(nursery)
                yield
            except Exception as error:  # noqa: BLE001 - raised below, outside the nursery, so that it is not grouped
                problem = error
            if problem is not None or not instance.is_finished:
                instance.context.is_cancelled = True
                nursery.cancel_scope.cancel()
    finally:
        await instance.aclose()
    if problem is not None and instance.failure is None:
        raise problem


# Sinks

_T = TypeVar("_T")

GRAPH_VERSION: Final = "1"
"""The version of every graph."""


class FirstPacketSink:
    """Sink that keeps the first packet of each output."""

    def __init__(self, outputs: int) -> None:
        self.packets: list[Packet | None] = [None] * outputs

    def put(self, output: int, packet: Packet) -> bool:
        """Keep a packet if it is the first of its output."""
        if self.packets[output] is None:
            self.packets[output] = packet
        return True

    async def wait_room(self) -> None:
        """Return at once; the sink is never full."""


class AllPacketSink:
    """Sink that keeps every packet of each output, up to ``max_bytes`` in total."""

    def __init__(self, outputs: Sequence[str], max_bytes: float) -> None:
        self.packets: list[list[Packet]] = [[] for _ in outputs]
        self._outputs = outputs
        self._most_bytes = max_bytes
        self._size = 0

    def put(self, output: int, packet: Packet) -> bool:
        """Keep a packet.

        Raises:
            PayloadTooLarge: the packets exceed ``max_output_bytes``.
            ServerError: the value cannot be written into a response.
        """
        self._size += output_of_value(self._outputs[output], packet.value).nbytes
        if self._size > self._most_bytes:
            raise PayloadTooLarge.of_outputs(self._size, self._most_bytes)
        self.packets[output].append(packet)
        return True

    async def wait_room(self) -> None:
        """Return at once; the sink is never full."""


class ReplyChannelSink(Generic[_T]):
    """Sink that converts each packet with ``convert(output, packet)`` and sends the reply to a channel.

    Replies that do not fit into the channel wait in an overflow queue.
    """

    def __init__(
        self, convert: Callable[[int, Packet], _T], channel: trio.MemorySendChannel[_T | StreamProblem]
    ) -> None:
        self._convert = convert
        self._channel = channel
        self._overflow: deque[_T | StreamProblem] = deque()
        self._lock = trio.Lock()

    def put(self, output: int, packet: Packet) -> bool:
        """Convert and send a packet."""
        return self.reply(self._convert(output, packet))

    def reply(self, reply: _T | StreamProblem) -> bool:
        """Send a reply; False if the caller must call :meth:`wait_room` before the next one.

        Raises:
            trio.BrokenResourceError: the graph has ended, and its channel is closed.
        """
        if not self._overflow:
            try:
                self._channel.send_nowait(reply)
            except trio.WouldBlock:
                pass
            except trio.ClosedResourceError:
                raise trio.BrokenResourceError("the graph has ended") from None
            except trio.BrokenResourceError:
                # The reader has left; the instance is about to be cancelled.
                return True
            else:
                return True
        self._overflow.append(reply)
        return False

    def refuse(self, request: InferRequest, message: str) -> bool:
        """Send the error of a request, as :meth:`reply`."""
        del request
        return self.reply(StreamProblem(message))

    async def wait_room(self) -> None:
        """Wait until every accepted reply is in the channel."""
        async with self._lock:
            while self._overflow:
                try:
                    await self._channel.send(self._overflow[0])
                except trio.BrokenResourceError:
                    self._overflow.clear()
                    return
                self._overflow.popleft()


@dataclass(slots=True)
class _StreamRequest:
    """A request of a stream whose replies carry its id.

    Attributes:
        marks_final: whether the last reply is marked and still missing.
        is_accepted: whether all packets of the request are in the graph.
    """

    timestamp: int
    id: str
    marks_final: bool
    is_accepted: bool = False


class ResponseSink(ReplyChannelSink[InferResponse]):
    """Sink of the responses of a stream, which have the ids of their requests.

    A packet belongs to the last request that is not later than its timestamp. A request has had its last response when
    no node can run, or when every output has passed the timestamp of the next request.

    Attributes:
        output_bounds: those of the instance.
    """

    def __init__(
        self, graph: str, outputs: Sequence[str], channel: trio.MemorySendChannel[InferResponse | StreamProblem]
    ) -> None:
        super().__init__(self._response, channel)
        self._graph = graph
        self._outputs = outputs
        self._requests: deque[_StreamRequest] = deque()
        """By timestamp; those of requests for different inputs may descend."""
        self._last: _StreamRequest | None = None
        self.output_bounds: Sequence[int] = ()

    def put(self, output: int, packet: Packet) -> bool:
        """Convert and send a packet, after the final responses of earlier requests."""
        response = self._response(output, packet)
        if self._requests:
            self._assign(response, packet.timestamp)
        return self.reply(response)

    def begin(self, request: InferRequest, timestamp: int) -> None:
        """Add a request before its packets; :meth:`accept` follows."""
        marks_final = request.parameters.get(ENABLE_FINAL_RESPONSE) is True if request.parameters else False
        if request.id or marks_final or self._requests:
            self._last = _StreamRequest(timestamp, request.id, marks_final)
            insort_right(self._requests, self._last, key=attrgetter("timestamp"))

    def accept(self) -> None:
        """Note that all packets of the last request are in the graph."""
        if self._last is not None:
            self._last.is_accepted = True

    def end_requests(self) -> None:
        """Send the missing final responses: no node can run."""
        while self._requests and self._requests[0].is_accepted:
            self._end(self._requests[0])
            if len(self._requests) == 1:
                # Nodes may still emit packets when they close.
                return
            self._requests.popleft()

    def refuse(self, request: InferRequest, message: str) -> bool:
        """Send the error of a request, which is its last reply."""
        marks_final = request.parameters.get(ENABLE_FINAL_RESPONSE) is True
        if not request.id and not marks_final:
            return super().refuse(request, message)
        if self._last is not None and not self._last.is_accepted:
            self._last.marks_final = False
        parameters: dict[str, ParameterValue] = {FINAL_RESPONSE: True} if marks_final else {}
        return self.reply(StreamProblem(message, self._empty(request.id, parameters)))

    def _response(self, output: int, packet: Packet) -> InferResponse:
        converted = output_of_value(self._outputs[output], packet.value)
        parameters: dict[str, ParameterValue] = {TIMESTAMP_PARAMETER: packet.timestamp}
        if isinstance(converted, InferResponse):
            converted.model_name, converted.model_version, converted.id = self._graph, GRAPH_VERSION, ""
            converted.parameters |= parameters
            return converted
        return InferResponse(self._graph, GRAPH_VERSION, [converted], "", parameters)

    def _assign(self, response: InferResponse, timestamp: int) -> None:
        requests = self._requests
        if len(requests) > 1 and requests[1].timestamp <= timestamp:
            passed = min(self.output_bounds)
            while len(requests) > 1 and requests[1].timestamp <= passed:
                self._end(requests.popleft())
        at = 1 if len(requests) == 1 else bisect_right(requests, timestamp, key=attrgetter("timestamp"))
        request = requests[at - 1] if at else None
        if request is not None and request.timestamp <= timestamp:
            response.id = request.id
            if request.marks_final:
                response.parameters[FINAL_RESPONSE] = False

    def _end(self, request: _StreamRequest) -> None:
        if request.marks_final:
            request.marks_final = False
            self.reply(self._empty(request.id, {FINAL_RESPONSE: True}))

    def _empty(self, request_id: str, parameters: dict[str, ParameterValue]) -> InferResponse:
        return InferResponse(self._graph, GRAPH_VERSION, [], request_id, parameters)


def output_of_value(stream: str, value: Any) -> Tensor | RawTensor | InferResponse:
    """Convert a packet's value to a response output named ``stream``.

    A Python tensor keeps its name, datatype and shape, even if its bytes do not fit them. A response is copied, so the
    caller may change it.
    """
    if isinstance(value, PythonTensor):
        return RawTensor(value.name, value.datatype, value.shape, tensor_bytes(value))
    if isinstance(value, TensorValue):
        return Tensor(stream, value.datatype, value.array)
    if isinstance(value, InferResponse):
        return replace(value, outputs=list(value.outputs), parameters=dict(value.parameters))
    raise graph_failure(
        f'Packet type mismatch on the graph\'s output stream "{stream}": expected a tensor, an image or a response, '
        f"got {type(value).__name__}"
    )
