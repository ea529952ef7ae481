"""When a model that lost its streams to a failure is to have them again."""

from __future__ import annotations

from ovmstrio.openvino.lost_streams import LostStreams


class _Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _lose(lost: LostStreams, clock: _Clock) -> float:
    """Lose streams and get them back as soon as they are due; gives what that took."""
    pause = lost.lose()
    clock.now += pause - 1
    assert (lost.are_lost, lost.are_due) == (True, False)
    clock.now += 1
    assert lost.are_due
    lost.regain()
    assert (lost.are_lost, lost.are_due) == (False, False)
    return pause


def test_who_loses_them_again_and_again_waits_twice_as_long_each_time_up_to_an_hour() -> None:
    """And no longer than at first behind ten minutes without a failure."""
    clock = _Clock()
    lost = LostStreams(clock)
    assert [_lose(lost, clock) for _ in range(9)] == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    clock.now += 601
    assert [_lose(lost, clock) for _ in range(2)] == [30, 60]


def test_a_failure_while_they_are_lost_makes_the_time_begin_again() -> None:
    """Somebody sends what fails still; while they are there it changes nothing."""
    clock = _Clock()
    lost = LostStreams(clock)
    lost.put_off()
    assert not lost.are_lost
    pause = lost.lose()
    due = []
    for _ in range(2):
        clock.now += pause
        due.append(lost.are_due)
        lost.put_off()
        due.append(lost.are_due)
    assert due == [True, False, True, False]


def test_what_could_not_be_compiled_is_tried_later_than_before() -> None:
    """It is lost all the time."""
    clock = _Clock()
    lost = LostStreams(clock)
    for pause in (30, 60, 120, 240, 480, 960, 1920, 3600, 3600):
        assert lost.lose() == pause
        clock.now += pause
        assert lost.are_due
