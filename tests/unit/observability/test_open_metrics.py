"""Metrics in OpenMetrics's format, as a scraper reads them that takes it."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ovmstrio.api.doors import KSERVE_GRPC
from ovmstrio.core.events import OK, CallEvent
from ovmstrio.observability.metrics import Metrics

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def _called(metrics: Metrics, trace_id: str = "", *, name: str = "m", kind: str = "model") -> None:
    event = CallEvent(name, "1", kind, KSERVE_GRPC, "ModelInfer", trace_id=trace_id)
    metrics.call_started(event)
    event.code, event.seconds = OK, 20e-6
    metrics.call_finished(event)


def _families(metrics: Metrics, *names: str) -> dict[str, Any]:
    """Read what the client library's own parser takes."""
    text = metrics.render(names, is_open=True).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("family", ["ovms_request_time_us", "ovmstrio_request_time_us"])
def test_the_last_call_of_a_bucket_that_was_traced_is_its_exemplar(family: str) -> None:
    """It has the trace's id and its own time; calls that nobody traced are none."""
    metrics = Metrics()
    for trace_id in ("", TRACE, ""):
        _called(metrics, trace_id)
    found = _families(metrics, family)[family]
    exemplars = [(sample.labels["le"], sample.exemplar) for sample in found.samples if sample.exemplar is not None]
    ((bound, exemplar),) = exemplars
    assert float(bound) >= 20
    assert (exemplar.labels, exemplar.value) == ({"trace_id": TRACE}, pytest.approx(20))
    assert TRACE.encode() not in metrics.render([family])


def test_names_of_ovms_stay_in_either_format() -> None:
    """A counter's name would have to end in another way there, and so these are of an unknown type."""
    metrics = Metrics()
    _called(metrics)
    families = _families(metrics)
    assert families["ovms_requests_success"].type == "unknown"
    assert {sample.name for sample in families["ovms_requests_success"].samples} == {"ovms_requests_success"}
    assert families["ovmstrio_requests"].type == "counter"
    assert {sample.name for sample in families["ovmstrio_requests"].samples} == {"ovmstrio_requests_total"}
    assert metrics.render(is_open=True).endswith(b"# EOF\n")


def test_calls_are_timed_by_their_kind() -> None:
    """Graphs as well, which OVMS's families time apart; questions are none."""
    metrics = Metrics()
    for name, kind in (("m", "model"), ("n", "model"), ("g", "graph")):
        _called(metrics, name=name, kind=kind)
    question = CallEvent("m", "1", "model", KSERVE_GRPC, "ModelReady", code=OK)
    metrics.call_finished(question)
    text = metrics.render(["ovmstrio_request_time_us"]).decode()
    assert 'ovmstrio_request_time_us_count{interface="gRPC",kind="model"} 2.0' in text
    assert 'ovmstrio_request_time_us_count{interface="gRPC",kind="graph"} 1.0' in text
