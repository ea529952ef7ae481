from __future__ import annotations

from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from trio.testing import MockClock

from ovmstrio.graphs.calculator import InstanceContext, NodeContext
from ovmstrio.graphs.instance import CLOSE_SECONDS, GraphInstance, run_instance
from ovmstrio.graphs.packets import Packet
from tests.support.calculators import Delivery, Emission, Gather, Recorder, in_port, out_port
from tests.support.waits import WAIT_SECONDS
from tests.unit.graphs.random_graphs import ANY_SPEED, AT_REST, Case, cases, make_recorders, model_of, plan_of, views
from tests.unit.graphs.reference import Feed, Handler, ModelNode


class Trial:
    """An instance of a graph that records its packets, and the model of it.

    Attributes:
        room: an output is full after so many packets, until the instance has waited for room.
        reader: if set, waits for room wait for it.
    """

    def __init__(self, case: Case, room: int = 10**9, **recorders: Recorder) -> None:
        self.case = case
        self.room = room
        self.reader: trio.Event | None = None
        self.recorders = make_recorders(case) | recorders
        self.model = model_of(case)
        self.packets: list[tuple[str, Packet]] = []
        context = InstanceContext("graph", {}, "request", float("inf"))
        self.instance = GraphInstance(plan_of(case, self.recorders), context, self)
        self._waiting = 0

    def put(self, output: int, packet: Packet) -> bool:
        self.packets.append((self.case.outputs[output], packet))
        self._waiting += 1
        return self._waiting < self.room

    async def wait_room(self) -> None:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        if self.reader is not None:
            await self.reader.wait()
        self._waiting = 0

    async def feed(self, *packets: Feed) -> None:
        for packet in packets or self.case.feed:
            await self.instance.push(packet.stream, packet.value, packet.timestamp)
            self.instance.dispatch()

    async def feed_and_finish(self) -> None:
        await self.feed()
        self.instance.close_inputs()
        self.instance.dispatch()

    def run_model(self) -> None:
        for packet in self.case.feed:
            self.model.step(packet)
        self.model.finish()

    def outputs(self) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in self.case.outputs}
        for name, packet in self.packets:
            found[name].append((packet.timestamp, packet.value))
        return found

    def check(self, *, at_rest: bool = False) -> None:
        assert self.instance.failure is None
        assert self.outputs() == self.model.outputs
        for node in self.case.nodes:
            deliveries = self.recorders[node.name].deliveries, self.model.deliveries[node.name]
            found, expected = [views(self.case, node, each, at_rest=at_rest) for each in deliveries]
            assert found == expected, node.name

    def check_closed(self) -> None:
        for name, recorder in self.recorders.items():
            assert (recorder.opened, recorder.closed, recorder.running) == (1, 1, 0), name
            assert recorder.most_running <= self.case.in_flight.get(name, 1), name


BOUNDS = cases(("Default", "Default", "Default", "Barrier"), bounds=True)
STEPPED = cases(AT_REST) | cases(AT_REST, loops=True) | cases(("FixedSize", "TimestampAlign"))
FREE = cases(ANY_SPEED) | cases(ANY_SPEED, loops=True) | BOUNDS


def properties(*strategies: SearchStrategy[Any], examples: int = 60) -> Callable[[Callable[..., Any]], Any]:
    """Run an async test with few examples that are the same each time, and as a slow test with many random ones."""
    common: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    quick = settings(max_examples=examples, derandomize=True, **common)
    slow = settings(max_examples=2500, **common)

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        def run(*arguments: Any) -> None:
            # Where nothing runs any more, the clock jumps to the end of WAIT_SECONDS.
            trio.run(bounded, arguments, clock=MockClock(autojump_threshold=0))

        async def bounded(arguments: tuple[Any, ...]) -> None:
            with trio.fail_after(WAIT_SECONDS):
                await test(*arguments)

        @pytest.mark.parametrize(
            "profile", [pytest.param(quick, id="quick"), pytest.param(slow, id="long", marks=pytest.mark.slow)]
        )
        def wrapped(profile: settings) -> None:
            profile(given(st.tuples(*strategies))(lambda arguments: run(*arguments)))()

        wrapped.__name__ = test.__name__
        return wrapped

    return decorate


@properties(STEPPED | BOUNDS, examples=120)
async def test_deliveries_match_the_model_after_each_packet(case: Case) -> None:
    trial = Trial(case)
    async with run_instance(trial.instance):
        for packet in case.feed:
            await trial.feed(packet)
            await trial.instance.wait_idle()
            trial.model.step(packet)
            trial.check(at_rest=True)
        await trial.instance.finish()
        trial.model.finish()
        assert trial.instance.is_finished
    trial.check(at_rest=True)
    trial.check_closed()


@properties(FREE, st.sampled_from([1, 2, 3, 10**9]), examples=120)
async def test_results_do_not_depend_on_speed_and_reader(case: Case, room: int) -> None:
    trial = Trial(case, room)
    async with run_instance(trial.instance):
        await trial.feed_and_finish()
        await trial.instance.wait_finished()
    trial.run_model()
    trial.check()
    trial.check_closed()
    for packets in trial.outputs().values():
        assert all(one < other for (one, _), (other, _) in pairwise(packets))


@properties(FREE)
async def test_results_do_not_depend_on_tasks(case: Case) -> None:
    trial = Trial(case)
    await trial.instance.start(None)
    for packet in case.feed:
        await trial.instance.push(packet.stream, packet.value, packet.timestamp)
        await trial.instance.wait_idle()
    await trial.instance.finish()
    await trial.instance.aclose()
    trial.run_model()
    trial.check()
    trial.check_closed()


@properties(FREE, st.integers(0, 60))
async def test_cancelled_graph_closes_its_calculators(case: Case, checkpoints: int) -> None:
    trial = Trial(case)
    tasks = trio.lowlevel.current_statistics().tasks_living

    async def cancel() -> None:
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel)
        async with run_instance(trial.instance):
            await trial.feed_and_finish()
            await trial.instance.wait_finished()
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    trial.run_model()
    for name, packets in trial.outputs().items():
        assert packets == trial.model.outputs[name][: len(packets)]
    for recorder in trial.recorders.values():
        assert (recorder.opened, recorder.running) == (recorder.closed, 0)
        assert recorder.opened <= 1


@properties(FREE.filter(lambda case: bool(case.feed)), st.data())
async def test_failed_node_ends_the_graph(case: Case, data: st.DataObject) -> None:
    trial = Trial(case)
    recorder = trial.recorders[data.draw(st.sampled_from([node.name for node in case.nodes]))]
    recorder.fail_at = data.draw(st.sampled_from([packet.timestamp for packet in case.feed]))
    async with run_instance(trial.instance):
        try:
            await trial.feed_and_finish()
        except trio.BrokenResourceError:
            assert trial.instance.failure is not None
        await trial.instance.wait_finished()
    has_failed = any(delivery.timestamp == recorder.fail_at for delivery in recorder.deliveries)
    assert (trial.instance.failure is not None) is has_failed
    trial.check_closed()


# Limits of the engine

PACKETS = tuple(Feed("in", number, number) for number in range(1, 31))


def gather(name: str, *sources: str, handler: str = "Default", bounds: bool = False) -> ModelNode:
    ports = [in_port(number) for number in range(len(sources))]
    inputs, outputs = tuple(zip(ports, sources, strict=True)), ((out_port(0), f"{name}_out"),)
    rule = Gather(name, (frozenset(ports),))
    return ModelNode(name, inputs, outputs, rule, Handler(handler), propagates_bounds=bounds)


@pytest.mark.parametrize("in_flight", [1, 3])
async def test_graph_waits_for_a_slow_reader(in_flight: int, autojump_clock: MockClock) -> None:
    trial = Trial(Case(("in",), ("a_out",), (gather("a", "in"),), PACKETS, 4, {"a": in_flight}), room=2)
    trial.reader = trio.Event()
    async with run_instance(trial.instance), trio.open_nursery() as nursery:
        nursery.start_soon(trial.feed)
        await trio.testing.wait_all_tasks_blocked()
        assert len(trial.packets) == 2
        assert len(trial.recorders["a"].deliveries) == 1 + in_flight
        assert len(nursery.child_tasks) == 1
        trial.reader.set()
        await trial.instance.wait_idle()
        while nursery.child_tasks:
            await trio.lowlevel.checkpoint()
        await trial.instance.finish()
    assert [packet.timestamp for _, packet in trial.packets] == [each.timestamp for each in PACKETS]


async def test_full_queue_stops_the_node_before_it() -> None:
    nodes = (gather("fast", "in"), gather("slow", "fast_out"))
    trial = Trial(Case(("in",), ("slow_out",), nodes, PACKETS, 2, {}, {"slow": (10,)}))
    ahead = []

    async def watch() -> None:
        while not trial.instance.is_finished:
            fast, slow = (len(trial.recorders[name].deliveries) for name in ("fast", "slow"))
            ahead.append(fast - slow)
            await trio.lowlevel.checkpoint()

    async with run_instance(trial.instance), trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await trial.feed()
        await trial.instance.finish()
    assert 2 <= max(ahead) <= 3
    assert len(trial.recorders["slow"].deliveries) == len(PACKETS)


def _reporting(*nodes: ModelNode, inputs: tuple[str, ...] = ("in",), feed: tuple[Feed, ...] = PACKETS[:4]) -> Trial:
    return Trial(Case(inputs, (f"{nodes[-1].name}_out",), nodes, feed, 1, report_deadlock=True))


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(lambda: _reporting(gather("a", "in")), id="packets left the queue"),
        pytest.param(
            lambda: _reporting(
                gather("a", "in"),
                gather("b", "a_out", "end", handler="EarlyClose"),
                inputs=("in", "end"),
                feed=PACKETS[:2],
            ),
            id="the node with the full queue closed",
        ),
        pytest.param(
            lambda: _reporting(
                gather("a", "in"),
                gather("b", "a_out", "which", handler="Mux"),
                inputs=("in", "which"),
                feed=(*PACKETS[:2], Feed("which", 9, 0), Feed("in", 9, 9)),
            ),
            id="the node with the full queue dropped packets",
        ),
    ],
)
async def test_producers_with_room_are_no_deadlock(trial: Callable[[], Trial]) -> None:
    made = trial()
    with trio.fail_after(WAIT_SECONDS):
        async with run_instance(made.instance):
            await made.feed_and_finish()
            await made.instance.wait_finished()
    assert made.instance.failure is None
    assert len(made.recorders["a"].deliveries) == sum(packet.stream == "in" for packet in made.case.feed)
    made.check_closed()


async def test_producers_without_room_are_a_deadlock_that_is_reported() -> None:
    trial = _reporting(gather("a", "in"), gather("b", "a_out", "never"), inputs=("in", "never"))
    async with run_instance(trial.instance):
        with pytest.raises(trio.BrokenResourceError):
            await trial.feed()
    assert "Detected a deadlock due to input throttling" in str(trial.instance.failure)


async def test_bounds_of_aligned_inputs_use_the_clock_of_the_base() -> None:
    align = gather("t", "base", "ahead", handler="TimestampAlign", bounds=True)
    trial = Trial(Case(("base", "ahead"), ("b_out",), (align, gather("b", "t_out")), ()))
    async with run_instance(trial.instance):
        for stream, timestamp in [("ahead", 1000), ("base", 10), ("base", 15), ("ahead", 1003), ("ahead", 1005)]:
            await trial.feed(Feed(stream, timestamp, 1))
            await trial.instance.wait_idle()
        await trial.instance.finish()
    assert trial.instance.failure is None
    assert [delivery.timestamp for delivery in trial.recorders["b"].deliveries] == [10, 13, 15]


async def test_outputs_of_one_run_are_sent_in_the_order_of_tags() -> None:
    def backwards(delivery: Delivery) -> list[Emission]:
        return [Emission(out_port(number), number, delivery.timestamp) for number in (2, 0, 1)]

    outputs = tuple((out_port(number), f"out{number}") for number in range(3))
    node = ModelNode("a", ((in_port(0), "in"),), outputs, backwards)
    trial = Trial(Case(("in",), ("out1", "out2", "out0"), (node,), PACKETS[:2]))
    async with run_instance(trial.instance):
        await trial.feed()
        await trial.instance.finish()
    assert [tuple(packet) for _, packet in trial.packets] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("selected", [1, 7, -1])
async def test_mux_of_a_missing_input_fails_the_run(selected: int) -> None:
    trial = Trial(Case(("in", "which"), ("m_out",), (gather("m", "in", "which", handler="Mux"),), ()))
    async with run_instance(trial.instance):
        await trial.feed(Feed("in", 1, 5), Feed("which", 1, selected))
        await trial.instance.wait_idle()
    text = f'for node "m" failed: IN:1 is {selected}, and must be the number of an input, 0 to 0'
    assert text in str(trial.instance.failure)


async def test_packet_out_of_order_fails_the_run() -> None:
    trial = Trial(Case(("in",), ("a_out",), (gather("a", "in"),), ()))
    async with run_instance(trial.instance):
        await trial.feed(Feed("in", 5, 1))
        for timestamp in (5, 6):
            with pytest.raises(trio.BrokenResourceError):
                await trial.instance.push("in", 2, timestamp)
    assert "Current minimum expected timestamp is 6 but received 5." in str(trial.instance.failure)
    assert trial.recorders["a"].closed == 1


class _NeverCloses(Recorder):
    async def close(self, context: NodeContext) -> None:
        await super().close(context)
        await trio.sleep_forever()


async def test_node_that_does_not_close_does_not_keep_others_open(autojump_clock: MockClock) -> None:
    nodes = gather("a", "in"), gather("b", "a_out"), gather("c", "b_out")
    trial = Trial(Case(("in",), ("c_out",), nodes, (), 4), a=_NeverCloses(lambda _: ()))
    async with run_instance(trial.instance):
        await trio.lowlevel.checkpoint()
    assert {name: each.closed for name, each in trial.recorders.items()} == {"a": 1, "b": 1, "c": 1}
    assert trio.current_time() < 2 * CLOSE_SECONDS


class _ClosesMissingOutput(Recorder):
    async def process(self, context: NodeContext) -> None:
        await super().process(context)
        context.close_output(out_port(7))


class _BrokenTrial(Trial):
    async def wait_room(self) -> None:
        raise RuntimeError("the sink is broken")


async def test_unexpected_error_is_the_failure_of_the_run() -> None:
    case = Case(("in",), ("a_out",), (gather("a", "in"),), ())
    closes = Trial(case, a=_ClosesMissingOutput(lambda _: ()))
    broken = _BrokenTrial(case, room=0)
    for trial in (closes, broken):
        async with run_instance(trial.instance):
            await trial.feed(Feed("in", 5, 1))
            await trial.instance.wait_finished()
    assert "there is no output" in str(closes.instance.failure)
    assert "RuntimeError: the sink is broken" in str(broken.instance.failure)
