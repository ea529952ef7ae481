"""How many inferences should run side by side, by the calls that come."""

from __future__ import annotations

import pytest

from ovmstrio.work.demand import Demand


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _look(demand: Demand, clock: _Clock, *, at_once: float, busy: float = 0.9, seconds: float = 5.0) -> int:
    """Look behind so many seconds of calls of 10 ms, so many at once, by which the device was busy to this part."""
    for _ in range(round(busy * seconds / 0.01)):
        demand.note(at_once, 0.01)
    clock.now += seconds
    return demand.look()


@pytest.mark.parametrize(
    ("at_once", "busy", "wanted"),
    [(1, 0.99, 1), (1.5, 0.99, 1), (2, 0.99, 2), (3, 0.7, 3), (32, 0.99, 4), (32, 0.3, 1), (2, 0.0, 1)],
)
def test_several_run_side_by_side_where_calls_keep_the_device_busy(at_once: float, busy: float, wanted: int) -> None:
    """As many as there are calls, and no more than cores; where the device has time to spare, one at a time."""
    clock = _Clock()
    assert _look(Demand(4, clock), clock, at_once=at_once, busy=busy) == wanted


def test_lone_calls_for_a_minute_have_the_cores_for_themselves_again() -> None:
    """Not before, as others may come back; and calls side by side meanwhile begin the minute anew."""
    clock = _Clock()
    demand = Demand(4, clock)
    demand.chosen = _look(demand, clock, at_once=8)
    assert [_look(demand, clock, at_once=1) for _ in range(11)] == [4] * 11
    assert _look(demand, clock, at_once=2, busy=0.1) == 4
    assert [_look(demand, clock, at_once=1) for _ in range(12)] == [4] * 11 + [1]


def test_a_model_that_nobody_calls_is_ready_for_a_lone_call() -> None:
    """Whoever comes first has the cores for itself."""
    clock = _Clock()
    demand = Demand(2, clock)
    demand.chosen = _look(demand, clock, at_once=2)
    assert _look(demand, clock, at_once=0, busy=0, seconds=59) == 2
    assert _look(demand, clock, at_once=0, busy=0, seconds=2) == 1


def test_more_calls_are_worth_another_choice_once_they_have_doubled() -> None:
    """Each choice compiles the model."""
    clock = _Clock()
    demand = Demand(16, clock)
    demand.chosen = _look(demand, clock, at_once=4)
    assert demand.chosen == 4
    assert [_look(demand, clock, at_once=at_once) for at_once in (6, 7, 8)] == [4, 4, 8]


def test_what_is_short_has_one_thread_until_most_of_the_time_is_that_of_long_calls() -> None:
    """And again behind a minute without; several long ones side by side share the cores out at once."""
    clock = _Clock()
    demand = Demand(4, clock, is_for_loop=True)

    def look(short: int, long: int, at_once: float = 1) -> int:
        for _ in range(short):
            demand.note(1, 0.0002)
        for _ in range(long):
            demand.note(at_once, 0.01)
        clock.now += 5.0
        demand.chosen = demand.look()
        return demand.chosen

    assert [look(1000, 0), look(0, 7), look(1000, 19), look(1000, 21)] == [0, 0, 0, 1]
    assert [look(1000, 0) for _ in range(12)] == [1] * 11 + [0]
    assert [look(0, 400, at_once=3), look(1000, 10)] == [3, 3]
    assert [look(0, 0) for _ in range(11)] == [*[3] * 10, 0]


def test_what_is_long_on_one_thread_keeps_all_cores_though_it_is_short_there() -> None:
    """Otherwise it would go to and fro every minute."""
    clock = _Clock()
    demand = Demand(1, clock, cores=4, is_for_loop=True)
    for _ in range(40):
        for _ in range(100):
            demand.note(1, 0.003 if demand.chosen == 0 else 0.0006)
        clock.now += 5.0
        demand.chosen = demand.look()
        assert demand.chosen == 1


def test_two_looks_at_the_same_moment_change_nothing() -> None:
    """Nothing has happened between them."""
    clock = _Clock()
    demand = Demand(2, clock)
    assert (demand.look(), demand.look()) == (1, 1)
