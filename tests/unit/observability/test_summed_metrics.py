"""Counters and histograms, and their sums over several processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ovmstrio.core.metric_families import Family
from ovmstrio.observability.summed_metrics import counted_only, restricted, sum_metrics
from ovmstrio.observability.tallies import Counts, Spreads

FIRST = rb"""# HELP calls Calls.
# TYPE calls counter
calls{name="a}\" 1",code="OK"} 3.0
# HELP ovmstrio_ready Ready.
# TYPE ovmstrio_ready gauge
ovmstrio_ready 1.0
# HELP time_us Time.
# TYPE time_us histogram
time_us_bucket{le="10.0"} 1.0
time_us_bucket{le="+Inf"} 2.0
time_us_count 2.0
time_us_sum 1e+06
"""
SECOND = rb"""# HELP calls Calls.
# TYPE calls counter
calls{name="a}\" 1",code="OK"} 4.0
calls{name="b",code="OK"} 1.0
# HELP ovmstrio_ready Ready.
# TYPE ovmstrio_ready gauge
ovmstrio_ready 0.0
# HELP time_us Time.
# TYPE time_us histogram
time_us_bucket{le="10.0"} 5.0
time_us_bucket{le="+Inf"} 5.0
time_us_count 5.0
time_us_sum 12.5
# HELP further Further.
# TYPE further gauge
further 7.0
"""


def test_samples_of_all_processes_are_added() -> None:
    text = sum_metrics([FIRST, SECOND]).decode()
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == {
        ("calls_total", "OK", 'a}" 1'): 7,
        ("calls_total", "OK", "b"): 1,
        ("ovmstrio_ready",): 0,
        ("time_us_bucket", "10.0"): 6,
        ("time_us_bucket", "+Inf"): 7,
        ("time_us_count",): 7,
        ("time_us_sum",): 1_000_012.5,
        ("further",): 7,
    }
    assert text.count("# TYPE") == 4


def test_exemplars_stay() -> None:
    line = b'# HELP t T.\n# TYPE t histogram\nt_bucket{le="1.0"} 1 # {trace_id="ab"} 0.5\n# EOF\n'
    lines = sum_metrics([line, line]).decode().splitlines()
    assert lines[2:] == ['t_bucket{le="1.0"} 2.0 # {trace_id="ab"} 0.5', "# EOF"]


def test_creation_times_are_not_added() -> None:
    text = b"""# HELP pd_calls_created Calls.
# TYPE pd_calls_created gauge
pd_calls_created %d.0
# HELP orders_created Orders.
# TYPE orders_created gauge
orders_created %d.0
"""
    lines = sum_metrics([text % (9, 1), text % (8, 2)]).decode().split("\n")
    assert {"pd_calls_created 8.0", "orders_created 3.0"} <= set(lines)


def test_labels_can_have_line_separators() -> None:
    text = '# HELP calls Calls.\n# TYPE calls counter\ncalls{name="a\u2028b\x85\r\x0cc"} 1.0\n'.encode()
    assert sum_metrics([text, text]).decode() == text.decode().replace(" 1.0", " 2.0")


def test_counters_of_an_ended_process_are_kept_and_gauges_are_not() -> None:
    text = (
        b'# HELP a A.\n# TYPE a gauge\na 1.0\n# HELP b_total B.\n# TYPE b_total counter\nb_total{x="1"} 2.0\n'
        b'# HELP c C.\n# TYPE c histogram\nc_bucket{le="+Inf"} 3.0\n'
    )
    counted = counted_only(text)
    assert counted == text[text.index(b"# HELP b_total") :]
    assert restricted(counted, ["b"]) == counted[: counted.index(b"# HELP c")]
    assert sum_metrics([text, counted]).splitlines()[5] == b'b_total{x="1"} 4.0'


def test_the_exemplar_of_the_first_process_is_kept() -> None:
    text = b'# HELP b B.\n# TYPE b histogram\nb_bucket{le="+Inf"} 1.0 # {trace_id="%s"} 1.0\n'
    assert b'b_bucket{le="+Inf"} 2.0 # {trace_id="now"} 1.0' in sum_metrics([text % b"now", text % b"then"])


LABELS = ("name", "version")
SPREAD = Family("took_us", "histogram", LABELS, "How long.", buckets=(10.0, 18.0, 32.5))
COUNTED = Family("asked", "counter", LABELS, "How often.")


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\\']), st.integers(0, 400))))
def test_counts_and_spreads_render_as_the_client_library_does(seen: list[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count, spread = Counts(COUNTED), Spreads(SPREAD)
    for made in (count, spread):
        ours.register(made)
    counter = Counter(COUNTED.name, COUNTED.help, LABELS, registry=theirs)
    histogram = Histogram(SPREAD.name, SPREAD.help, LABELS, buckets=SPREAD.buckets, registry=theirs)
    for name, eighths in seen:
        value = eighths / 8
        for each in (count, counter):
            each.labels(name, "1").inc()
        for every in (spread, histogram):
            every.labels(name, "1").observe(value)

    assert generate_latest(ours) == generate_latest(theirs)
    for name in ("took_us_bucket", "asked_total"):
        only = [name]
        assert generate_latest(ours.restricted_registry(only)) == generate_latest(theirs.restricted_registry(only))
