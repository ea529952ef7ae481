"""What the engine does at its limits: full queues, readers that do not read, and policies that cannot go on."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from ovmstrio.runtimes.graphs.calculator import InstanceContext, NodeContext
from ovmstrio.runtimes.graphs.graph_instance import CLOSE_SECONDS, GraphInstance, running
from ovmstrio.runtimes.graphs.packets import Packet
from tests.support.calculators import Delivery, Emission, Gather, Recorder, in_port, out_port
from tests.unit.graphs.random_graphs import Case, Recorders, make_recorders, plan_of
from tests.unit.graphs.reference import Feed, Handler, ModelNode

PACKETS = tuple(Feed("in", number, number) for number in range(1, 31))


class SlowSink:
    """Takes ``room`` packets, and more only when it is opened."""

    def __init__(self, room: int = 10**9) -> None:
        self.packets: list[Packet] = []
        self.opened = trio.Event()
        self._room = room

    def put(self, output: int, packet: Packet) -> bool:
        """Take a packet."""
        self.packets.append(packet)
        return self.opened.is_set() or len(self.packets) < self._room

    async def wait_room(self) -> None:
        """Wait until it is opened."""
        await self.opened.wait()


def gather(name: str, *sources: str, handler: Handler = Handler(), skip: int = 0, bounds: bool = False) -> ModelNode:  # noqa: B008 - immutable
    ports = [in_port(number) for number in range(len(sources))]
    rule = Gather(name, (frozenset(ports),), skip)
    inputs = tuple(zip(ports, sources, strict=True))
    return ModelNode(name, inputs, ((out_port(0), f"{name}_out"),), rule, handler, propagates_bounds=bounds)


def _backwards(delivery: Delivery) -> list[Emission]:
    return [Emission(out_port(number), number, delivery.timestamp) for number in (2, 0, 1)]


def begin(case: Case, sink: SlowSink) -> tuple[GraphInstance, Recorders]:
    recorders = make_recorders(case)
    return GraphInstance(plan_of(case, recorders), InstanceContext("graph", {}, "", float("inf")), sink), recorders


async def feed(instance: GraphInstance, packets: tuple[Feed, ...]) -> None:
    for each in packets:
        await instance.push(each.stream, each.value, each.timestamp)
        instance.dispatch()


@pytest.mark.parametrize("in_flight", [1, 3])
async def test_graph_waits_for_a_slow_reader(in_flight: int, autojump_clock: Any) -> None:
    case = Case(("in",), ("a_out",), (gather("a", "in"),), PACKETS, 4, {"a": in_flight})
    sink = SlowSink(room=2)
    instance, recorders = begin(case, sink)
    async with running(instance), trio.open_nursery() as nursery:
        nursery.start_soon(feed, instance, PACKETS)
        await trio.testing.wait_all_tasks_blocked()
        assert len(sink.packets) == 2
        assert len(recorders["a"].deliveries) == 1 + in_flight
        assert len(nursery.child_tasks) == 1
        sink.opened.set()
        await instance.wait_idle()
        while nursery.child_tasks:
            await trio.lowlevel.checkpoint()
        await instance.finish()
    assert [packet.timestamp for packet in sink.packets] == [each.timestamp for each in PACKETS]


async def test_full_queue_stops_the_node_before_it() -> None:
    nodes = (gather("fast", "in"), gather("slow", "fast_out"))
    case = Case(("in",), ("slow_out",), nodes, PACKETS, 2, {}, {"slow": (10,)})
    instance, recorders = begin(case, SlowSink())
    ahead = []

    async def watch() -> None:
        while not instance.is_finished:
            ahead.append(len(recorders["fast"].deliveries) - len(recorders["slow"].deliveries))
            await trio.lowlevel.checkpoint()

    async with running(instance), trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await feed(instance, PACKETS)
        await instance.finish()
    assert 2 <= max(ahead) <= 3
    assert len(recorders["slow"].deliveries) == len(PACKETS)


async def test_bounds_of_aligned_inputs_use_the_clock_of_the_base() -> None:
    align = gather("t", "base", "ahead", handler=Handler("TimestampAlign"), bounds=True)
    case = Case(("base", "ahead"), ("b_out",), (align, gather("b", "t_out")), ())
    instance, recorders = begin(case, SlowSink())
    async with running(instance):
        for stream, timestamp in [("ahead", 1000), ("base", 10), ("base", 15), ("ahead", 1003), ("ahead", 1005)]:
            await feed(instance, (Feed(stream, timestamp, 1),))
            await instance.wait_idle()
        await instance.finish()
    assert instance.failure is None
    assert [delivery.timestamp for delivery in recorders["b"].deliveries] == [10, 13, 15]


async def test_outputs_of_one_run_are_sent_in_the_order_of_tags() -> None:
    outputs = tuple((out_port(number), f"out{number}") for number in range(3))
    node = ModelNode("a", ((in_port(0), "in"),), outputs, _backwards)
    case = Case(("in",), ("out1", "out2", "out0"), (node,), PACKETS[:2])
    sink = SlowSink()
    instance, _ = begin(case, sink)
    async with running(instance):
        await feed(instance, case.feed)
        await instance.finish()
    assert [tuple(packet) for packet in sink.packets] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("chosen", [1, 7, -1])
async def test_mux_of_a_missing_input_fails_the_run(chosen: int) -> None:
    case = Case(("in", "which"), ("m_out",), (gather("m", "in", "which", handler=Handler("Mux")),), ())
    instance, _ = begin(case, SlowSink())
    async with running(instance):
        await feed(instance, (Feed("in", 1, 5), Feed("which", 1, chosen)))
        await instance.wait_idle()
    assert instance.failure is not None
    assert f'for node "m" failed: IN:1 is {chosen}, and must be the number of an input, 0 to 0' in str(instance.failure)


async def test_packet_out_of_order_fails_the_run() -> None:
    case = Case(("in",), ("a_out",), (gather("a", "in"),), ())
    instance, recorders = begin(case, SlowSink())
    async with running(instance):
        await feed(instance, (Feed("in", 5, 1),))
        with pytest.raises(trio.BrokenResourceError):
            await instance.push("in", 2, 5)
        with pytest.raises(trio.BrokenResourceError):
            await instance.push("in", 3, 6)
    assert "Current minimum expected timestamp is 6 but received 5." in str(instance.failure)
    assert recorders["a"].closed == 1


class _NeverCloses(Recorder):
    async def close(self, context: NodeContext) -> None:
        """Count, and wait for what does not come."""
        await super().close(context)
        await trio.sleep_forever()


async def test_node_that_does_not_close_does_not_keep_others_open(autojump_clock: Any) -> None:
    case = Case(("in",), ("c_out",), (gather("a", "in"), gather("b", "a_out"), gather("c", "b_out")), (), 4)
    recorders = make_recorders(case)
    recorders["a"] = _NeverCloses(recorders["a"].rule)
    instance = GraphInstance(plan_of(case, recorders), InstanceContext("graph", {}, "", float("inf")), SlowSink())
    async with running(instance):
        await trio.lowlevel.checkpoint()
    assert {name: each.closed for name, each in recorders.items()} == {"a": 1, "b": 1, "c": 1}
    assert trio.current_time() < 2 * CLOSE_SECONDS
