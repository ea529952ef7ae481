"""Metrics as a scraper sees them."""

from __future__ import annotations

import re

import pytest

from ovmstrio.api.doors import KSERVE_GRPC, KSERVE_REST, TENSORFLOW_GRPC
from ovmstrio.core.errors import GraphFailure, InvalidRequest
from ovmstrio.core.events import OK, CallEvent, Door, Step
from ovmstrio.core.metric_families import BUCKETS_US, FAMILIES
from ovmstrio.observability.log_writer import WRITER
from ovmstrio.observability.metrics import Metrics


def _samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    # The client library's own parser gives counters back the suffix that must not be there.
    lines = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", metrics.render().decode(), re.MULTILINE)
    return {(name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))): float(value) for name, labels, value in lines}


def _value(metrics: Metrics, family: str, /, **labels: str) -> float | None:
    return _samples(metrics).get((family, frozenset(labels.items())))


def _ended(metrics: Metrics, event: CallEvent, code: str = OK) -> None:
    metrics.call_started(event)
    event.code = code
    metrics.call_finished(event)


def _infer(metrics: Metrics, code: str = OK) -> None:
    _ended(metrics, CallEvent("m", "1", "model", KSERVE_GRPC, "ModelInfer"), code)


REQUEST = {"name": "m", "api": "KServe", "interface": "gRPC", "version": "1"}


def test_a_loaded_version_shows_every_outcome_at_zero() -> None:
    """A dashboard can be drawn before the first request came."""
    metrics = Metrics()
    metrics.servable("m", "1")
    assert _value(metrics, "ovms_requests_success", **REQUEST, method="ModelInfer") == 0
    assert _value(metrics, "ovms_requests_fail", **REQUEST | {"interface": "REST"}, method="ModelInfer") == 0
    assert _value(metrics, "ovms_requests_success", **REQUEST | {"version": ""}, method="ModelReady") == 0


def test_each_api_has_its_own_methods() -> None:
    """What came over the TensorFlow Serving API is counted under its names, the status of models under no version."""
    metrics = Metrics()
    metrics.servable("m", "1")
    theirs = REQUEST | {"api": "TensorFlowServing"}
    assert _value(metrics, "ovms_requests_success", **theirs, method="GetModelMetadata") == 0
    for method in ("Predict", "GetModelStatus"):
        _ended(metrics, CallEvent("m", "1", "model", TENSORFLOW_GRPC, method))
    assert _value(metrics, "ovms_requests_success", **theirs, method="Predict") == 1
    assert _value(metrics, "ovms_requests_success", **theirs | {"version": ""}, method="GetModelStatus") == 1
    assert _value(metrics, "ovms_requests_success", **REQUEST, method="ModelInfer") == 0
    assert _value(metrics, "ovms_request_time_us_count", name="m", version="1", interface="gRPC") == 1
    assert _value(metrics, "ovms_current_requests", name="m", version="1") == 0


def test_each_outcome_moves_its_own_counter() -> None:
    """Success and failure are counted apart, and failures by their kind."""
    metrics = Metrics()
    for code in (OK, OK, "InvalidRequest", "ModelFailure"):
        _infer(metrics, code)
    assert _value(metrics, "ovms_requests_success", **REQUEST, method="ModelInfer") == 2
    assert _value(metrics, "ovms_requests_fail", **REQUEST, method="ModelInfer") == 2
    assert _value(metrics, "ovmstrio_requests_total", **REQUEST, method="ModelInfer", code="InvalidRequest") == 1
    assert _value(metrics, "ovmstrio_requests_total", **REQUEST, method="ModelInfer", code="ModelFailure") == 1


def test_requests_in_process_return_to_zero() -> None:
    """The gauge goes up with a start and down with an end, whatever the outcome."""
    metrics = Metrics()
    event = CallEvent("m", "1", "model", KSERVE_REST, "ModelInfer")
    metrics.call_started(event)
    assert _value(metrics, "ovms_current_requests", name="m", version="1") == 1
    event.code = "Cancelled"
    metrics.call_finished(event)
    assert _value(metrics, "ovms_current_requests", name="m", version="1") == 0


def test_a_retired_version_leaves_the_gauges_and_its_counts_stay() -> None:
    """What it has is shown no more, the other version's is, and a call that ends after it is still counted."""
    metrics = Metrics(["ovms_streams", "ovms_current_requests", "ovms_requests_success", "ovms_infer_req_active"])
    for version in ("1", "2"):
        bound = metrics.servable("m", version)
        bound.set_streams(4)
        bound.set_pool(8, 3)
        bound.set_load_seconds(1.5)
        bound.set_memory("compiled", 1000)
        bound.placed(inline=True, moved=True)
    _infer(metrics)
    late = CallEvent("m", "1", "model", KSERVE_GRPC, "ModelInfer")
    metrics.call_started(late)
    metrics.retired("m", "1")
    late.code = OK
    metrics.call_finished(late)

    counted = {"ovms_requests_success", "ovmstrio_requests_total", "ovmstrio_placement_moves_total"}
    assert {name for name, labels in _samples(metrics) if ("version", "1") in labels} == counted
    assert _value(metrics, "ovms_requests_success", **REQUEST, method="ModelInfer") == 2
    assert _value(metrics, "ovms_streams", name="m", version="2") == 4
    assert _value(metrics, "ovmstrio_memory_bytes", name="m", version="2", part="compiled") == 1000

    metrics.servable("m", "1").set_pool(8, 0)
    assert _value(metrics, "ovms_infer_req_active", name="m", version="1") == 0
    assert _value(metrics, "ovms_current_requests", name="m", version="1") == 0
    assert _value(metrics, "ovms_requests_success", **REQUEST, method="ModelInfer") == 2


def test_a_version_retires_without_a_look_at_others() -> None:
    """A thousand may end in one turn of the event loop."""
    metrics = Metrics(["ovms_current_requests", "ovms_streams"])
    looks: list[None] = []

    def look() -> int:
        looks.append(None)
        return 0

    for name in ("m", "other"):
        metrics.servable(name, "1").set_streams(2)
        metrics.child("ovms_current_requests", name, "1").set_function(look)
    metrics.retired("m", "1")
    assert not looks
    assert not any(("name", "m") in labels for name, labels in _samples(metrics) if name == "ovms_streams")
    assert _value(metrics, "ovms_streams", name="other", version="1") == 2


def test_counter_names_are_those_of_ovms() -> None:
    """Dashboards written for OVMS ask for names without a suffix."""
    metrics = Metrics()
    _infer(metrics)
    text = metrics.render().decode()
    assert "\n# TYPE ovms_requests_success counter\n" in text
    assert "ovms_requests_success_total" not in text
    assert "_created" not in text


def test_histograms_have_the_bounds_of_ovms() -> None:
    """The first and last bounds are those that the specification lists."""
    assert BUCKETS_US[:6] == (10, 18, 32, 58, 104, 188)
    assert BUCKETS_US[-1] == 1474755971
    metrics = Metrics()
    metrics.servable("m", "1").inferred(0, 20e-6)
    assert _value(metrics, "ovms_inference_time_us_bucket", name="m", version="1", le="18.0") == 0
    assert _value(metrics, "ovms_inference_time_us_bucket", name="m", version="1", le="32.0") == 1


def test_a_list_of_families_replaces_the_default_set() -> None:
    """Asking for one family turns the others of OVMS off."""
    metrics = Metrics(["ovms_infer_req_active"])
    bound = metrics.servable("m", "1")
    bound.set_pool(4, 3)
    _infer(metrics)
    names = {name for name, _ in _samples(metrics)}
    assert "ovms_requests_success" not in names
    assert _value(metrics, "ovms_infer_req_active", name="m", version="1") == 3


def test_the_servers_own_families_may_be_off() -> None:
    """What is not asked for is counted nowhere, whatever happens."""
    metrics = Metrics(["ovms_requests_success"], ["ovmstrio_ready"])
    bound = metrics.servable("m", "1")
    bound.set_load_seconds(1.0)
    bound.placed(inline=True, moved=True)
    bound.batch_size(3)
    _infer(metrics)
    assert {name for name, _ in _samples(metrics)} == {"ovms_requests_success", "ovmstrio_ready"}


def test_the_process_tells_its_memory_and_its_time() -> None:
    """Read when somebody scrapes, found by name, and off where others are asked for."""
    metrics = Metrics()
    assert (_value(metrics, "process_resident_memory_bytes") or 0) > 2**20
    before = _value(metrics, "process_cpu_seconds_total") or 0
    sum(range(2**20))
    assert (_value(metrics, "process_cpu_seconds_total") or 0) > before
    told = metrics.render(["process_cpu_seconds", "process_resident_memory_bytes"]).decode()
    names = {line.split()[0] for line in told.splitlines() if line[0] != "#"}
    assert names == {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def test_families_off_by_default_are_the_two_of_the_pool() -> None:
    """The default set is the one of the specification."""
    assert {name for name, row in FAMILIES.items() if not row.default} == {
        "ovms_infer_req_queue_size",
        "ovms_infer_req_active",
    }


GRAPH = {"name": "g", "api": "KServe", "interface": "gRPC"}


def test_a_loaded_graph_shows_its_families_at_zero() -> None:
    """Each has a child for every method and interface, and none has a version."""
    metrics = Metrics()
    metrics.graph("g")
    samples = _samples(metrics)
    for method in ("ModelInfer", "ModelInferStream"):
        for family in ("requests_accepted", "requests_rejected", "responses", "graph_error"):
            for interface in ("gRPC", "REST"):
                labels = GRAPH | {"interface": interface, "method": method}
                assert samples[f"ovms_{family}", frozenset(labels.items())] == 0
        assert _value(metrics, "ovms_graph_processing_time_us_count", name="g", method=method) == 0
    assert _value(metrics, "ovms_current_graphs", name="g") == 0
    asked = GRAPH | {"version": "", "method": "ModelReady"}
    assert _value(metrics, "ovms_requests_success", **asked) == 0


def test_requests_of_a_graph_are_counted_by_what_became_of_them() -> None:
    """Taken in, refused, answered and failed are four families, by method and interface."""
    metrics = Metrics()
    graph = metrics.graph("g")
    streamed = CallEvent("g", "1", "graph", KSERVE_GRPC, "ModelInferStream")
    for step, times in ((Step.ACCEPTED, 4), (Step.ANSWERED, 3)):
        for _ in range(times):
            metrics.call_moved(streamed, step)

    def called(door: Door, error: Exception) -> None:
        event = CallEvent("g", "1", "graph", door, "ModelInfer", error=error)
        _ended(metrics, event, type(error).__name__)

    for _ in range(2):
        called(KSERVE_REST, InvalidRequest("shape"))
    called(KSERVE_GRPC, GraphFailure("node"))
    stream, rest = GRAPH | {"method": "ModelInferStream"}, GRAPH | {"method": "ModelInfer", "interface": "REST"}
    assert _value(metrics, "ovms_requests_accepted", **stream) == 4
    assert _value(metrics, "ovms_responses", **stream) == 3
    assert _value(metrics, "ovms_requests_rejected", **rest) == 2
    assert _value(metrics, "ovms_graph_error", **GRAPH, method="ModelInfer") == 1
    assert _value(metrics, "ovms_requests_accepted", **rest) == 0
    assert metrics.graph("g") is graph


def test_batches_are_two_histograms_of_the_models_that_have_them() -> None:
    """Sizes in rows and waits in microseconds; a model without batches has neither."""
    metrics = Metrics()
    batched = metrics.servable("m", "1")
    metrics.servable("other", "1")
    assert _value(metrics, "ovmstrio_batch_size_count", name="m", version="1") is None
    for size in (16, 3):
        batched.batch_size(size)
    batched.queue_time(0.005)
    labels = {"name": "m", "version": "1"}
    assert _value(metrics, "ovmstrio_batch_size_sum", **labels) == 19
    assert _value(metrics, "ovmstrio_batch_size_bucket", **labels, le="8.0") == 1
    assert _value(metrics, "ovmstrio_batch_wait_time_us_sum", **labels) == 5000
    assert _value(metrics, "ovmstrio_batch_size_count", name="other", version="1") is None


def test_instances_of_a_graph_are_a_gauge_and_a_histogram() -> None:
    """The gauge returns to zero whatever happens; the time of those that failed is not recorded."""
    metrics = Metrics()
    graph = metrics.graph("g")
    graph.started()
    graph.started()
    assert _value(metrics, "ovms_current_graphs", name="g") == 2
    graph.finished("ModelInfer", 20e-6, ok=True)
    graph.finished("ModelInferStream", 5.0, ok=False)
    assert _value(metrics, "ovms_current_graphs", name="g") == 0
    assert _value(metrics, "ovms_graph_processing_time_us_sum", name="g", method="ModelInfer") == 20
    assert _value(metrics, "ovms_graph_processing_time_us_bucket", name="g", method="ModelInfer", le="18.0") == 0
    assert _value(metrics, "ovms_graph_processing_time_us_count", name="g", method="ModelInferStream") == 0


def test_requests_to_a_graph_leave_the_families_of_models_alone() -> None:
    """Only metadata and readiness are counted there; this server's own family has every outcome."""
    metrics = Metrics()
    metrics.graph("g")
    for method, code in (("ModelInfer", OK), ("ModelInferStream", "GraphFailure"), ("ModelMetadata", OK)):
        _ended(metrics, CallEvent("g", "1", "graph", KSERVE_GRPC, method), code)
    none = GRAPH | {"version": ""}
    assert _value(metrics, "ovms_requests_success", **none, method="ModelMetadata") == 1
    assert _value(metrics, "ovmstrio_requests_total", **none, method="ModelInfer", code=OK) == 1
    assert _value(metrics, "ovmstrio_requests_total", **none, method="ModelInferStream", code="GraphFailure") == 1
    for version in ("", "1"):
        assert _value(metrics, "ovms_requests_success", **GRAPH, version=version, method="ModelInfer") is None
    assert _value(metrics, "ovms_current_requests", name="g", version="1") is None


def test_a_graph_that_is_turned_into_a_model_is_counted_as_one() -> None:
    """And the other way round."""
    metrics = Metrics()
    metrics.graph("m")
    _infer(metrics)
    assert _value(metrics, "ovms_requests_success", **REQUEST, method="ModelInfer") == 1
    _ended(metrics, CallEvent("m", "1", "graph", KSERVE_GRPC, "ModelInfer"))
    assert _value(metrics, "ovms_requests_success", **REQUEST, method="ModelInfer") == 1


def test_families_of_graphs_may_be_off() -> None:
    """A graph whose families are not asked for counts nothing and fails nothing."""
    metrics = Metrics(["ovms_streams"])
    graph = metrics.graph("g")
    graph.started()
    graph.moved(CallEvent("g", "1", "graph", KSERVE_GRPC, "ModelInfer"), Step.ACCEPTED)
    graph.finished("ModelInfer", 1.0, ok=True)
    assert not [name for name, _ in _samples(metrics) if name.startswith("ovms_")]


def test_dropped_lines_of_the_log_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, however often it is asked."""
    metrics = Metrics()
    for dropped in (3, 3, 5):
        monkeypatch.setattr(WRITER, "dropped", dropped)
        assert _value(metrics, "ovmstrio_dropped_log_lines_total") == dropped
