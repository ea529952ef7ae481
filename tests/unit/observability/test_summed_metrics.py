"""The metrics of several processes as those of one server."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from ovmstrio.observability.summed_metrics import counted_only, restricted, sum_metrics

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


def test_samples_of_all_processes_are_added_up() -> None:
    """Each family and each sample is there once; what only one process has is there, too."""
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


def test_what_stands_behind_a_value_stays() -> None:
    """As a trace that a bucket names."""
    line = b'# HELP t T.\n# TYPE t histogram\nt_bucket{le="1.0"} 1 # {trace_id="ab"} 0.5\n# EOF\n'
    lines = sum_metrics([line, line]).decode().splitlines()
    assert lines[2:] == ['t_bucket{le="1.0"} 2.0 # {trace_id="ab"} 0.5', "# EOF"]


def test_moments_are_not_added_up() -> None:
    """Those at which the server began to count; what code of users calls so is a count."""
    text = b"""# HELP pd_calls_created Calls.
# TYPE pd_calls_created gauge
pd_calls_created %d.0
# HELP orders_created Orders.
# TYPE orders_created gauge
orders_created %d.0
"""
    lines = sum_metrics([text % (9, 1), text % (8, 2)]).decode().split("\n")
    assert {"pd_calls_created 8.0", "orders_created 3.0"} <= set(lines)


def test_labels_may_have_any_characters() -> None:
    """Also such as end lines elsewhere."""
    text = '# HELP calls Calls.\n# TYPE calls counter\ncalls{name="a\u2028b\x85\r\x0cc"} 1.0\n'.encode()
    assert sum_metrics([text, text]).decode() == text.decode().replace(" 1.0", " 2.0")


def test_what_counts_is_kept_and_what_tells_how_it_is_now_is_not() -> None:
    """Of a process that has ended; families that are asked for are found with and without what formats add."""
    text = (
        b'# HELP a A.\n# TYPE a gauge\na 1.0\n# HELP b_total B.\n# TYPE b_total counter\nb_total{x="1"} 2.0\n'
        b'# HELP c C.\n# TYPE c histogram\nc_bucket{le="+Inf"} 3.0\n'
    )
    counted = counted_only(text)
    assert counted == text[text.index(b"# HELP b_total") :]
    assert restricted(counted, ["b"]) == counted[: counted.index(b"# HELP c")]
    assert sum_metrics([text, counted]).splitlines()[5] == b'b_total{x="1"} 4.0'


def test_an_exemplar_is_the_first_ones() -> None:
    """And so not of a process that has ended, whose figures come last."""
    text = b'# HELP b B.\n# TYPE b histogram\nb_bucket{le="+Inf"} 1.0 # {trace_id="%s"} 1.0\n'
    assert b'b_bucket{le="+Inf"} 2.0 # {trace_id="now"} 1.0' in sum_metrics([text % b"now", text % b"then"])
