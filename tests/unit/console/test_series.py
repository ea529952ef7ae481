from __future__ import annotations

import tracemalloc

import pytest

from ovmstrio.console.series import MAX_SERVICES, POINTS, STEP_SECONDS, SeriesHistory, TimeSeries, merge_series


def test_an_hour_is_kept_and_the_oldest_points_are_dropped() -> None:
    series = TimeSeries(["rate"])
    for number in range(1, POINTS + 11):
        series.add(1000 + number, {"rate": number})
    document = series.document()
    assert POINTS * STEP_SECONDS == 3600
    assert document["series"]["rate"] == list(range(11, POINTS + 11))
    assert document["end"] == (1000 + POINTS + 10 + 1) * STEP_SECONDS


def test_intervals_without_a_sample_are_unknown() -> None:
    series = TimeSeries(["rate", "p99"])
    series.add(10, {"rate": 1.5, "p99": None})
    series.add(13, {"rate": 2, "p99": 7})
    assert series.document() == {
        "seconds": 5,
        "end": 70,
        "series": {"rate": [1.5, None, None, 2], "p99": [None, None, None, 7]},
    }


def test_a_long_gap_drops_everything_before() -> None:
    series = TimeSeries(["rate"])
    series.add(10, {"rate": 1})
    series.add(10 + 3 * POINTS, {"rate": 2})
    assert series.document()["series"]["rate"] == [2]


def test_an_empty_series_has_no_points() -> None:
    assert TimeSeries(["rate"]).document() == {"seconds": 5, "end": 0, "series": {"rate": []}}
    assert merge_series([]) == {"seconds": 5, "end": 0, "series": {}}


def test_an_idle_service_has_a_rate_of_zero_and_no_latency() -> None:
    history = SeriesHistory()
    history.add(1, {"rate": 4}, {"cats": {"rate": 4, "p50": 0.25}})
    history.add(2, {"rate": 0}, {})
    document = history.document("cats")
    assert document is not None
    assert (document["series"]["rate"], document["series"]["p50"]) == ([4, 0], [0.25, None])
    assert history.document("dogs") is None


@pytest.mark.parametrize("seconds", [3 * STEP_SECONDS, 24 * 3600])
def test_a_clock_that_is_set_back_starts_again_at_its_time(seconds: int) -> None:
    history = SeriesHistory()
    for number in range(10):
        history.add(100_000 + number, {"rate": 1}, {"cats": {"rate": 1}})
    now = 100_009 - seconds // STEP_SECONDS
    for number in range(2):
        history.add(now + number, {"rate": 2}, {"cats": {"rate": 2}})
    for document in (history.document(), history.document("cats")):
        assert document is not None
        assert document["end"] == (now + 2) * STEP_SECONDS
        assert document["series"]["rate"][-2:] == [2, 2]


def test_the_memory_is_fixed_whatever_is_served() -> None:
    tracemalloc.start()
    try:
        history = SeriesHistory()
        for number in range(MAX_SERVICES + 50):
            history.add(number + 1, {}, {f"service{number}": {"rate": 1}})
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 2,880 bytes per series, and less than 1 KiB of names and objects per service.
    assert taken < (8 + 6 * MAX_SERVICES) * 2880 + MAX_SERVICES * 1024
    assert len(history.services) == MAX_SERVICES
    assert history.document("service49") is None
    assert history.document(f"service{MAX_SERVICES + 49}") is not None


def test_the_series_of_workers_complete_each_other() -> None:
    one, other = TimeSeries(["rate"]), TimeSeries(["rate"])
    for interval in (1, 2, 3, 6):
        one.add(interval, {"rate": interval})
    for interval in (3, 4, 6, 7):
        other.add(interval, {"rate": interval * 10})
    merged = merge_series([one.document(), other.document()])
    assert merged == {"seconds": 5, "end": 40, "series": {"rate": [1, 2, 3, 40, None, 6, 70]}}


def test_large_values_are_kept_as_bytes() -> None:
    series = TimeSeries(["memory_bytes"])
    series.add(1, {"memory_bytes": 3 * 2**30})
    assert series.document()["series"]["memory_bytes"] == [3 * 2**30]
