"""Which calls leave the event loop because there are so many."""

from __future__ import annotations

from ovmstrio.work.crowd import Crowd


class _Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_calls_stay_on_a_loop_that_has_time_to_spare() -> None:
    """However many there are one after the other."""
    crowd = Crowd(_Clock())
    assert not any(crowd.leaves(0, loop_is_full=False) for _ in range(100))


def test_calls_leave_a_loop_that_has_none_until_few_are_left() -> None:
    """Also when the loop has time again, which their leaving has given it; some lone calls bring them back."""
    crowd = Crowd(_Clock())
    assert crowd.leaves(0, loop_is_full=True)
    assert all(crowd.leaves(others, loop_is_full=False) for others in [0, 1, 2, 8, 1, 0] * 100)
    assert [crowd.leaves(1, loop_is_full=False) for _ in range(40)].index(False) == 30
    assert not crowd.is_there


def test_a_loop_that_is_full_of_something_else_is_asked_once_a_second() -> None:
    """Calls that find nobody beside them come back, and nearly all of them stay."""
    clock = _Clock()
    crowd = Crowd(clock)
    left = 0
    for _ in range(10_000):
        left += crowd.leaves(0, loop_is_full=True)
        clock.now += 0.001
    assert 250 <= left <= 400
