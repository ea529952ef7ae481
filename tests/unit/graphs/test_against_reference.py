"""The engine and a slow model of it are given the same graphs and packets, and must agree about everything."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from trio.testing import MockClock

from ovmstrio.runtimes.graphs.calculator import InstanceContext
from ovmstrio.runtimes.graphs.graph_instance import GraphInstance, running
from ovmstrio.runtimes.graphs.packets import Packet
from tests.support.waits import WAIT_SECONDS
from tests.unit.graphs.random_graphs import (
    ANY_SPEED,
    AT_REST,
    Case,
    Recorders,
    cases,
    make_recorders,
    model_of,
    plan_of,
    views,
)

Property = Callable[[Case], None]


class Outputs:
    """Keeps every packet of each output; says that there is no room after ``room`` packets, until it was waited for."""

    def __init__(self, names: Sequence[str], room: int = 10**9) -> None:
        self.packets: dict[str, list[Packet]] = {name: [] for name in names}
        self.most_waiting = 0
        self._names = names
        self._room = room
        self._waiting = 0

    def put(self, output: int, packet: Packet) -> bool:
        """Keep a packet."""
        self.packets[self._names[output]].append(packet)
        self._waiting += 1
        self.most_waiting = max(self.most_waiting, self._waiting)
        return self._waiting < self._room

    async def wait_room(self) -> None:
        """Make room after a while."""
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        self._waiting = 0

    def plain(self) -> dict[str, list[tuple[int, int]]]:
        """Give the packets as the model has them."""
        return {name: [(packet.timestamp, packet.value) for packet in kept] for name, kept in self.packets.items()}


def begin(case: Case, recorders: Recorders, sink: Outputs) -> GraphInstance:
    return GraphInstance(plan_of(case, recorders), InstanceContext("graph", {}, "request", float("inf")), sink)


def run(test: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:

    async def bounded() -> None:
        with trio.fail_after(WAIT_SECONDS):
            await test(*arguments)

    trio.run(bounded, clock=MockClock(autojump_threshold=0))


def check_deliveries(case: Case, recorders: Recorders, model: Any, *, at_rest: bool) -> None:
    for node in case.nodes:
        found = views(case, node, recorders[node.name].deliveries, at_rest=at_rest)
        expected = views(case, node, model.deliveries[node.name], at_rest=at_rest)
        assert found == expected, node.name


def check_ending(case: Case, recorders: Recorders) -> None:
    for name, recorder in recorders.items():
        assert (recorder.opened, recorder.closed, recorder.running) == (1, 1, 0), name
        assert recorder.most_running <= case.in_flight.get(name, 1), name


def check_ascending(sink: Outputs) -> None:
    for packets in sink.packets.values():
        assert all(one.timestamp < other.timestamp for one, other in pairwise(packets))


async def at_rest(case: Case) -> None:
    """Push one packet, wait until nothing runs, and compare; then the next."""
    recorders, sink, model = make_recorders(case), Outputs(case.outputs), model_of(case)
    instance = begin(case, recorders, sink)
    async with running(instance):
        for feed in case.feed:
            await instance.push(feed.stream, feed.value, feed.timestamp)
            instance.dispatch()
            await instance.wait_idle()
            model.step(feed)
            check_deliveries(case, recorders, model, at_rest=True)
            assert sink.plain() == model.outputs
        await instance.finish()
        model.finish()
        assert instance.is_finished
    assert instance.failure is None
    check_deliveries(case, recorders, model, at_rest=True)
    assert sink.plain() == model.outputs
    check_ending(case, recorders)


async def at_any_speed(case: Case, room: int = 10**9) -> None:
    """Push as fast as the graph takes it, and compare at the end."""
    recorders, sink, model = make_recorders(case), Outputs(case.outputs, room), model_of(case)
    instance = begin(case, recorders, sink)
    async with running(instance):
        for feed in case.feed:
            await instance.push(feed.stream, feed.value, feed.timestamp)
            instance.dispatch()
            model.step(feed)
        instance.close_inputs()
        instance.dispatch()
        await instance.wait_finished()
    model.finish()
    assert instance.failure is None
    check_deliveries(case, recorders, model, at_rest=False)
    assert sink.plain() == model.outputs
    check_ascending(sink)
    check_ending(case, recorders)


async def in_the_own_task(case: Case) -> None:
    """Run without a nursery, as calls of simple graphs are."""
    recorders, sink, model = make_recorders(case), Outputs(case.outputs), model_of(case)
    instance = begin(case, recorders, sink)
    await instance.start(None)
    for feed in case.feed:
        await instance.push(feed.stream, feed.value, feed.timestamp)
        await instance.wait_idle()
        model.step(feed)
    await instance.finish()
    await instance.aclose()
    model.finish()
    assert instance.failure is None
    check_deliveries(case, recorders, model, at_rest=False)
    assert sink.plain() == model.outputs
    check_ending(case, recorders)


async def cut_short(case: Case, after: int) -> None:
    """Cancel everything after so many checkpoints; what came out until then is what the model says."""
    recorders, sink, model = make_recorders(case), Outputs(case.outputs), model_of(case)
    instance = begin(case, recorders, sink)
    tasks = trio.lowlevel.current_task().parent_nursery
    async with trio.open_nursery() as nursery:

        async def cancel() -> None:
            for _ in range(after):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

        nursery.start_soon(cancel)
        async with running(instance):
            for feed in case.feed:
                await instance.push(feed.stream, feed.value, feed.timestamp)
                instance.dispatch()
            instance.close_inputs()
            instance.dispatch()
            await instance.wait_finished()
    assert tasks is not None
    assert len(tasks.child_tasks) <= 1
    for feed in case.feed:
        model.step(feed)
    model.finish()
    for name, packets in sink.plain().items():
        assert packets == model.outputs[name][: len(packets)]
    for recorder in recorders.values():
        assert (recorder.opened, recorder.running) == (recorder.closed, 0)
        assert recorder.opened <= 1


async def with_a_failure(case: Case, node: str, fail_at: int) -> None:
    """One run fails: the graph ends, and every node that was opened is closed once."""
    recorders, sink = make_recorders(case), Outputs(case.outputs)
    recorders[node].fail_at = fail_at
    instance = begin(case, recorders, sink)
    async with running(instance):
        try:
            for feed in case.feed:
                await instance.push(feed.stream, feed.value, feed.timestamp)
                instance.dispatch()
            instance.close_inputs()
            instance.dispatch()
        except trio.BrokenResourceError:
            assert instance.failure is not None
        await instance.wait_finished()
    met = any(delivery.timestamp == fail_at for delivery in recorders[node].deliveries)
    assert (instance.failure is not None) is met
    check_ending(case, recorders)


# The default profile is short and the same each time; the slow one is long and new each time.

QUICK = settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LONG = settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow])

BOUNDS = cases(("Default", "Default", "Default", "Barrier"), bounds=True)
STEPPED = cases(AT_REST) | cases(AT_REST, loops=True) | cases(("FixedSize", "TimestampAlign"))
FREE = cases(ANY_SPEED) | cases(ANY_SPEED, loops=True) | BOUNDS
POINTS = st.integers(0, 60)


def both(*strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:

    def decorate(test: Callable[..., None]) -> Any:
        @pytest.mark.parametrize(
            "profile", [pytest.param(QUICK, id="quick"), pytest.param(LONG, id="long", marks=pytest.mark.slow)]
        )
        def wrapped(profile: settings) -> None:
            profile(given(*strategies)(test))()

        wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
        return wrapped

    return decorate


@both(STEPPED)
def test_deliveries_match_the_model_after_each_packet(case: Case) -> None:
    run(at_rest, case)


@both(BOUNDS)
def test_bounds_match_the_model(case: Case) -> None:
    run(at_rest, case)


@both(FREE)
def test_results_do_not_depend_on_speed(case: Case) -> None:
    run(at_any_speed, case)


@both(FREE, st.integers(1, 3))
def test_results_do_not_depend_on_the_reader(case: Case, room: int) -> None:
    run(at_any_speed, case, room)


@both(FREE)
def test_results_do_not_depend_on_tasks(case: Case) -> None:
    run(in_the_own_task, case)


@both(FREE, POINTS)
def test_cancelled_graph_closes_its_calculators(case: Case, after: int) -> None:
    run(cut_short, case, after)


@both(FREE.filter(lambda case: bool(case.feed)), st.data())
def test_failed_node_ends_the_graph(case: Case, data: st.DataObject) -> None:
    node = data.draw(st.sampled_from([node.name for node in case.nodes]))
    fail_at = data.draw(st.sampled_from([feed.timestamp for feed in case.feed]))
    run(with_a_failure, case, node, fail_at)
