from __future__ import annotations

import re
import threading
from collections import Counter as Counted
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics

from ovmstrio.core.errors import (
    CallerLimited,
    GraphFailure,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    ServiceLoading,
    ServiceMissing,
    TooManyRequests,
    VersionMissing,
    VersionRetired,
)
from ovmstrio.core.events import OK, ApiInterface, CallEvent, StreamProgress
from ovmstrio.core.generation import Finish
from ovmstrio.core.metric_families import (
    BUCKETS_US,
    FAMILIES,
    Family,
    matching_families,
)
from ovmstrio.core.resource_registry import current_resource_registry, owned_by
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.serving.batching import Batcher, BatchOptions
from ovmstrio.serving.interfaces import KSERVE_GRPC, KSERVE_REST, TENSORFLOW_GRPC
from ovmstrio.telemetry.aggregate_metrics import select_families, sum_metrics, without_gauges
from ovmstrio.telemetry.log_writer import WRITER
from ovmstrio.telemetry.loop_utilization import current_loop_utilization
from ovmstrio.telemetry.metrics import MetricFamily, Metrics, render_family
from ovmstrio.telemetry.process_metrics import MemoryGrowthMeter
from ovmstrio.text.text_metrics import CANCELLED, TextMetrics
from tests.support.descriptors import without_free_descriptors
from tests.support.waits import WAIT_SECONDS

CALL = {"name": "m", "api": "KServe", "interface": "gRPC", "version": "1", "method": "ModelInfer"}
READY = CALL | {"version": "", "method": "ModelReady"}
MODEL = {"name": "m", "version": "1"}
GRAPH = {"name": "g", "api": "KServe", "interface": "gRPC", "method": "ModelInfer"}
STREAM = GRAPH | {"method": "ModelInferStream"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def _samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    # The client library's own parser gives counters back the suffix that must not be there.
    lines = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", metrics.render().decode(), re.MULTILINE)
    return {(name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))): float(value) for name, labels, value in lines}


def _value(metrics: Metrics, family: str, labels: Mapping[str, str] | None = None, /, **more: str) -> float | None:
    return _samples(metrics).get((family, frozenset({**(labels or {}), **more}.items())))


def _end(metrics: Metrics, event: CallEvent, code: str = OK) -> None:
    metrics.call_started(event)
    event.code = code
    metrics.call_finished(event)


def _infer(metrics: Metrics, code: str = OK) -> None:
    _end(metrics, CallEvent("m", "1", "model", KSERVE_GRPC, "ModelInfer"), code)


def test_each_api_has_its_own_methods_which_a_loaded_version_shows_at_zero(metrics: Metrics) -> None:
    metrics.servable("m", "1")
    tensorflow = CALL | {"api": "TensorFlowServing"}
    assert _value(metrics, "ovms_requests_fail", CALL, interface="REST") == 0
    assert _value(metrics, "ovms_requests_success", READY) == 0
    assert _value(metrics, "ovms_requests_success", tensorflow, method="GetModelMetadata") == 0
    for method in ("Predict", "GetModelStatus"):
        _end(metrics, CallEvent("m", "1", "model", TENSORFLOW_GRPC, method))
    assert _value(metrics, "ovms_requests_success", tensorflow, method="Predict") == 1
    assert _value(metrics, "ovms_requests_success", tensorflow, version="", method="GetModelStatus") == 1
    assert _value(metrics, "ovms_requests_success", CALL) == 0
    assert _value(metrics, "ovms_request_time_us_count", MODEL, interface="gRPC") == 1
    assert _value(metrics, "ovms_current_requests", MODEL) == 0


def test_names_that_are_no_utf8_do_not_stop_the_scrape(metrics: Metrics) -> None:
    metrics.servable("m\udcff", "1")
    assert _value(metrics, "ovms_current_requests", name="m?", version="1") == 0


def test_each_outcome_moves_its_own_counter(metrics: Metrics) -> None:
    for code in (OK, OK, "InvalidRequest", "ModelFailure"):
        _infer(metrics, code)
    assert _value(metrics, "ovms_requests_success", CALL) == 2
    assert _value(metrics, "ovms_requests_fail", CALL) == 2
    assert _value(metrics, "ovmstrio_requests_total", CALL, code="InvalidRequest") == 1
    assert _value(metrics, "ovmstrio_requests_total", CALL, code="ModelFailure") == 1


def test_current_requests_return_to_zero_after_a_cancelled_call(metrics: Metrics) -> None:
    event = CallEvent("m", "1", "model", KSERVE_REST, "ModelInfer")
    metrics.call_started(event)
    assert _value(metrics, "ovms_current_requests", MODEL) == 1
    event.code = "Cancelled"
    metrics.call_finished(event)
    assert _value(metrics, "ovms_current_requests", MODEL) == 0


def test_a_retired_version_leaves_the_gauges_and_keeps_its_counters() -> None:
    metrics = Metrics(["ovms_streams", "ovms_current_requests", "ovms_requests_success", "ovms_infer_req_active"])
    for version in ("1", "2"):
        bound = metrics.servable("m", version)
        bound.set_streams(4)
        bound.set_pool(8, 3)
        bound.set_load_seconds(1.5)
        bound.set_memory("compiled", 1000)
        bound.set_execution_mode(inline=True, changed=True)
    _infer(metrics)
    late = CallEvent("m", "1", "model", KSERVE_GRPC, "ModelInfer")
    metrics.call_started(late)
    metrics.retired("m", "1")
    late.code = OK
    metrics.call_finished(late)
    counters = {"ovms_requests_success", "ovmstrio_requests_total", "ovmstrio_execution_switches_total"}
    counters.add("ovmstrio_placement_moves_total")  # Its earlier name.
    assert {name for name, labels in _samples(metrics) if ("version", "1") in labels} == counters
    assert _value(metrics, "ovms_requests_success", CALL) == 2
    assert _value(metrics, "ovms_streams", name="m", version="2") == 4
    assert _value(metrics, "ovmstrio_memory_bytes", name="m", version="2", part="compiled") == 1000
    metrics.servable("m", "1").set_pool(8, 0)
    assert _value(metrics, "ovms_infer_req_active", MODEL) == 0
    assert _value(metrics, "ovms_current_requests", MODEL) == 0
    assert _value(metrics, "ovms_requests_success", CALL) == 2


def test_a_removed_service_leaves_the_gauges_of_its_name_until_it_is_loaded_again(metrics: Metrics) -> None:
    for _ in range(2):
        graph = metrics.graph("g")
        graph.started()
        metrics.add_limited_service("g", lambda: 3)
        assert _value(metrics, "ovms_current_graphs", name="g") == 1
        assert _value(metrics, "ovmstrio_queued_requests", name="g") == 3
        metrics.removed("g")
        # A late call and queries of a removed graph.
        graph.finished("ModelInfer", 1.0, ok=True)
        _end(metrics, CallEvent("g", "1", "graph", KSERVE_GRPC, "ModelReady"), "NotFound")
        assert _value(metrics, "ovms_current_graphs", name="g") is None
        assert _value(metrics, "ovmstrio_queued_requests", name="g") is None
    assert _value(metrics, "ovms_graph_processing_time_us_count", name="g", method="ModelInfer") == 2


def test_counters_of_ovms_have_no_suffix_in_either_format(metrics: Metrics) -> None:
    _infer(metrics)
    text = metrics.render().decode()
    assert "\n# TYPE ovms_requests_success counter\n" in text
    assert "ovms_requests_success_total" not in text
    assert "_created" not in text
    families = _open_families(metrics)
    assert families["ovms_requests_success"].type == "unknown"
    assert {sample.name for sample in families["ovms_requests_success"].samples} == {"ovms_requests_success"}
    assert families["ovmstrio_requests"].type == "counter"
    assert {sample.name for sample in families["ovmstrio_requests"].samples} == {"ovmstrio_requests_total"}
    assert metrics.render(is_open=True).endswith(b"# EOF\n")


def test_histograms_have_the_bounds_of_ovms(metrics: Metrics) -> None:
    assert BUCKETS_US[:6] == (10, 18, 32, 58, 104, 188)
    assert BUCKETS_US[-1] == 1474755971
    metrics.servable("m", "1").inferred(0, 20e-6)
    assert _value(metrics, "ovms_inference_time_us_bucket", MODEL, le="18.0") == 0
    assert _value(metrics, "ovms_inference_time_us_bucket", MODEL, le="32.0") == 1


def test_a_list_of_families_replaces_the_default_families() -> None:
    defaults_off = {"ovms_infer_req_queue_size", "ovms_infer_req_active"}
    assert {name for name, row in FAMILIES.items() if not row.default} == defaults_off
    metrics = Metrics(["ovms_infer_req_active"])
    metrics.servable("m", "1").set_pool(4, 3)
    _infer(metrics)
    assert "ovms_requests_success" not in metrics.render().decode()
    assert _value(metrics, "ovms_infer_req_active", MODEL) == 3


def test_families_of_the_server_can_be_disabled() -> None:
    metrics = Metrics(["ovms_requests_success"], ["ovmstrio_ready"])
    bound = metrics.servable("m", "1")
    bound.set_load_seconds(1.0)
    bound.set_execution_mode(inline=True, changed=True)
    bound.batch_size(3)
    graph = metrics.graph("g")
    graph.started()
    graph.stream_progressed(CallEvent("g", "1", "graph", KSERVE_GRPC, "ModelInfer"), StreamProgress.ACCEPTED)
    graph.finished("ModelInfer", 1.0, ok=True)
    _infer(metrics)
    assert {name for name, _ in _samples(metrics)} == {"ovms_requests_success", "ovmstrio_ready"}


def test_process_metrics_are_read_at_each_scrape(metrics: Metrics) -> None:
    assert (_value(metrics, "process_resident_memory_bytes") or 0) > 2**20
    before = _value(metrics, "process_cpu_seconds_total") or 0
    sum(range(2**20))
    assert (_value(metrics, "process_cpu_seconds_total") or 0) > before
    text = metrics.render(["process_cpu_seconds", "process_resident_memory_bytes"]).decode()
    names = {line.split()[0] for line in text.splitlines() if line[0] != "#"}
    assert names == {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def test_a_process_without_free_descriptors_has_metrics(metrics: Metrics) -> None:
    metrics.render()
    with without_free_descriptors() as limit:
        samples = _samples(metrics)
    assert samples["process_open_fds", frozenset()] == samples["process_max_fds", frozenset()] == limit
    assert ("process_resident_memory_bytes", frozenset()) not in samples


def test_batches_are_two_histograms_of_models_with_batching(metrics: Metrics) -> None:
    batched = metrics.servable("m", "1")
    metrics.servable("other", "1")
    assert _value(metrics, "ovmstrio_batch_size_count", MODEL) is None
    for size in (16, 3):
        batched.batch_size(size)
    batched.queue_time(0.005)
    assert _value(metrics, "ovmstrio_batch_size_sum", MODEL) == 19
    assert _value(metrics, "ovmstrio_batch_size_bucket", MODEL, le="8.0") == 1
    assert _value(metrics, "ovmstrio_batch_wait_time_seconds_sum", MODEL) == 0.005
    assert _value(metrics, "ovmstrio_batch_size_count", name="other", version="1") is None


def test_dropped_log_lines_are_counted(monkeypatch: pytest.MonkeyPatch, metrics: Metrics) -> None:
    for dropped in (3, 3, 5):
        monkeypatch.setattr(WRITER, "dropped", dropped)
        assert _value(metrics, "ovmstrio_dropped_log_lines_total") == dropped


# Graphs


def test_a_loaded_graph_shows_its_families_at_zero(metrics: Metrics) -> None:
    metrics.graph("g")
    samples = _samples(metrics)
    for labels in (GRAPH, STREAM):
        for family in ("requests_accepted", "requests_rejected", "responses", "graph_error"):
            for interface in ("gRPC", "REST"):
                assert samples[f"ovms_{family}", frozenset((labels | {"interface": interface}).items())] == 0
        assert _value(metrics, "ovms_graph_processing_time_us_count", name="g", method=labels["method"]) == 0
    assert _value(metrics, "ovms_current_graphs", name="g") == 0
    assert _value(metrics, "ovms_requests_success", GRAPH, version="", method="ModelReady") == 0


def test_requests_of_a_graph_are_counted_by_outcome_method_and_interface(metrics: Metrics) -> None:
    graph = metrics.graph("g")
    stream = CallEvent("g", "1", "graph", KSERVE_GRPC, "ModelInferStream")
    for step in (StreamProgress.ACCEPTED,) * 4 + (StreamProgress.ANSWERED,) * 3:
        metrics.call_moved(stream, step)
    calls: list[tuple[ApiInterface, Exception]] = [(KSERVE_REST, InvalidRequest("shape"))] * 2
    for api_interface, error in (*calls, (KSERVE_GRPC, GraphFailure("node"))):
        _end(metrics, CallEvent("g", "1", "graph", api_interface, "ModelInfer", error=error), type(error).__name__)
    assert _value(metrics, "ovms_requests_accepted", STREAM) == 4
    assert _value(metrics, "ovms_responses", STREAM) == 3
    assert _value(metrics, "ovms_requests_rejected", GRAPH, interface="REST") == 2
    assert _value(metrics, "ovms_graph_error", GRAPH) == 1
    assert _value(metrics, "ovms_requests_accepted", GRAPH, interface="REST") == 0
    assert metrics.graph("g") is graph


def test_instances_of_a_graph_are_a_gauge_and_a_histogram_of_successes(metrics: Metrics) -> None:
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


def test_requests_to_a_graph_leave_the_families_of_models_unchanged(metrics: Metrics) -> None:
    metrics.graph("g")
    for method, code in (("ModelInfer", OK), ("ModelInferStream", "GraphFailure"), ("ModelMetadata", OK)):
        _end(metrics, CallEvent("g", "1", "graph", KSERVE_GRPC, method), code)
    assert _value(metrics, "ovms_requests_success", GRAPH, version="", method="ModelMetadata") == 1
    assert _value(metrics, "ovmstrio_requests_total", GRAPH, version="", code=OK) == 1
    assert _value(metrics, "ovmstrio_requests_total", STREAM, version="", code="GraphFailure") == 1
    for version in ("", "1"):
        assert _value(metrics, "ovms_requests_success", GRAPH, version=version) is None
    assert _value(metrics, "ovms_current_requests", name="g", version="1") is None


def test_a_name_that_changes_its_kind_is_counted_as_the_new_kind(metrics: Metrics) -> None:
    metrics.graph("m")
    _infer(metrics)
    assert _value(metrics, "ovms_requests_success", CALL) == 1
    _end(metrics, CallEvent("m", "1", "graph", KSERVE_GRPC, "ModelInfer"))
    assert _value(metrics, "ovms_requests_success", CALL) == 1


# OpenMetrics


def _open_families(metrics: Metrics, *names: str) -> dict[str, Any]:
    text = metrics.render(names, is_open=True).decode()
    return {family.name: family for family in parse_open_metrics(text)}  # type: ignore[no-untyped-call]


def _timed_call(metrics: Metrics, trace_id: str = "", *, name: str = "m", kind: str = "model") -> None:
    event = CallEvent(name, "1", kind, KSERVE_GRPC, "ModelInfer", trace_id=trace_id)
    event.seconds = 20e-6
    _end(metrics, event)


@pytest.mark.parametrize(("family", "taken"), [("ovms_request_time_us", 20), ("ovmstrio_request_time_seconds", 20e-6)])
def test_the_last_traced_call_of_a_bucket_is_its_exemplar(family: str, taken: float, metrics: Metrics) -> None:
    for trace_id in ("", TRACE, ""):
        _timed_call(metrics, trace_id)
    samples = _open_families(metrics, family)[family].samples
    ((bound, exemplar),) = [(sample.labels["le"], sample.exemplar) for sample in samples if sample.exemplar is not None]
    assert float(bound) >= taken
    assert (exemplar.labels, exemplar.value) == ({"trace_id": TRACE}, pytest.approx(taken))
    assert TRACE.encode() not in metrics.render([family])


def test_inference_calls_are_timed_by_kind(metrics: Metrics) -> None:
    for name, kind in (("m", "model"), ("n", "model"), ("g", "graph")):
        _timed_call(metrics, name=name, kind=kind)
    metrics.call_finished(CallEvent("m", "1", "model", KSERVE_GRPC, "ModelReady", code=OK))
    text = metrics.render(["ovmstrio_request_time_seconds"]).decode()
    assert 'ovmstrio_request_time_seconds_count{interface="gRPC",kind="model"} 2.0' in text
    assert 'ovmstrio_request_time_seconds_count{interface="gRPC",kind="graph"} 1.0' in text


# Metrics of text models, under vLLM's names as well


def _text_metrics() -> TextMetrics:
    text = TextMetrics("m")
    for gauge, value in ((text.running, 3), (text.waiting, 2), (text.cache_usage, 0.25)):
        gauge.set(value)
    text.generation_tokens.inc(7)
    text.first_token.observe(0.2)
    for reason in (Finish.STOP, Finish.LENGTH, "tool_calls", CANCELLED):
        text.finished(reason, 0.5, 4)
    return text


def _vllm_samples(metrics: Metrics) -> dict[str, float]:
    with metrics.collecting((_text_metrics(),), ""):
        text = metrics.render().decode()
    assert 'ovmstrio_llm_requests_running{model_name="m"} 3.0' in text
    return {name: float(value) for name, value in re.findall(r"(?m)^(vllm:\w+(?:{.*})?) (\S+)$", text)}


def test_names_of_vllm_are_added_on_request() -> None:
    samples = _vllm_samples(Metrics(vllm_names=True))
    finished = 'vllm:request_success_total{{engine="0",finished_reason="{}",model_name="m"}}'
    expected = {
        'vllm:num_requests_running{engine="0",model_name="m"}': 3,
        'vllm:num_requests_waiting{engine="0",model_name="m"}': 2,
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"}': 0.25,
        'vllm:generation_tokens_total{engine="0",model_name="m"}': 7,
        'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"}': 1,
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="m"}': 1,
        finished.format("stop"): 2,
        finished.format("length"): 1,
        finished.format("abort"): 1,
    }
    assert {name: samples[name] for name in expected} == expected
    assert _vllm_samples(Metrics()) == {}


def test_families_of_services_are_selected_by_name(metrics: Metrics) -> None:
    with metrics.collecting((_text_metrics(),), ""):
        text = metrics.render(["ovmstrio_llm_generation_tokens", "ovmstrio_llm_requests_waiting"]).decode()
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'ovmstrio_llm_requests_waiting{model_name="m"} 2.0',
        'ovmstrio_llm_generation_tokens_total{model_name="m"} 7.0',
    ]


# Sums over processes


def _page(name: str, kind: str, samples: list[str]) -> str:
    return "".join(f"{line}\n" for line in (f"# HELP {name} Text.", f"# TYPE {name} {kind}", *samples))


LABELLED = 'calls{name="a}\\" 1",code="OK"} '
SEPARATORS = 'calls{name="a\u2028b\x85\r\x0cc"} '
EXEMPLAR = 't_bucket{le="1.0"} %s # {trace_id="%s"} 0.5'
BUCKETS = ['t_us_bucket{le="10.0"} ', 't_us_bucket{le="+Inf"} ', "t_us_count ", "t_us_sum "]


@pytest.mark.parametrize(
    ("name", "kind", "first", "second", "total"),
    [
        ("calls", "counter", [f"{LABELLED}3.0"], [f"{LABELLED}4.0"], [f"{LABELLED}7.0"]),
        ("calls", "counter", [f"{SEPARATORS}1.0"], [f"{SEPARATORS}1.0"], [f"{SEPARATORS}2.0"]),
        ("calls", "counter", ['calls{n="a"} 3.0'], ['calls{n="b"} 1.0'], ['calls{n="a"} 3.0', 'calls{n="b"} 1.0']),
        ("ovmstrio_ready", "gauge", ["ovmstrio_ready 1.0"], ["ovmstrio_ready 0.0"], ["ovmstrio_ready 0.0"]),
        (
            "t_us",
            "histogram",
            [each + value for each, value in zip(BUCKETS, ("1.0", "2.0", "2.0", "1e+06"), strict=True)],
            [each + value for each, value in zip(BUCKETS, ("5.0", "5.0", "5.0", "12.5"), strict=True)],
            [each + value for each, value in zip(BUCKETS, ("6.0", "7.0", "7.0", "1000012.5"), strict=True)],
        ),
        ("t", "histogram", [EXEMPLAR % (1.0, "now")], [EXEMPLAR % (1.0, "then")], [EXEMPLAR % (2.0, "now")]),
        ("pd_calls_created", "gauge", ["pd_calls_created 9.0"], ["pd_calls_created 8.0"], ["pd_calls_created 8.0"]),
        ("orders_created", "gauge", ["orders_created 1.0"], ["orders_created 2.0"], ["orders_created 3.0"]),
    ],
)
def test_samples_of_all_processes_are_added(
    name: str, kind: str, first: list[str], second: list[str], total: list[str]
) -> None:
    further = _page("further", "gauge", ["further 7.0"])
    summed = sum_metrics([_page(name, kind, first).encode(), (_page(name, kind, second) + further).encode()])
    assert summed.decode() == _page(name, kind, total) + further


def test_counters_of_an_ended_process_are_kept_and_gauges_are_not() -> None:
    text = (
        b'# HELP a A.\n# TYPE a gauge\na 1.0\n# HELP b_total B.\n# TYPE b_total counter\nb_total{x="1"} 2.0\n'
        b'# HELP c C.\n# TYPE c histogram\nc_bucket{le="+Inf"} 3.0\n'
    )
    counted = without_gauges(text)
    assert counted == text[text.index(b"# HELP b_total") :]
    assert select_families(counted, ["b"]) == counted[: counted.index(b"# HELP c")]
    assert sum_metrics([text, counted]).splitlines()[5] == b'b_total{x="1"} 4.0'


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    "name", ["ovmstrio_requests", "ovmstrio_requests_total", "ovms_request_time_us_bucket", "ovms_request_time_us_sum"]
)
def test_counts_of_an_ended_process_are_selected_as_those_of_a_running_one(name: str, *, is_open: bool) -> None:
    metrics = Metrics()
    _infer(metrics)
    running = metrics.render([name], is_open=is_open)
    ended = select_families(without_gauges(metrics.render(is_open=is_open)), [name])
    assert [each for each in ended.splitlines() if each.startswith(b"ovm")] == [
        each for each in running.splitlines() if each.startswith(b"ovm")
    ]
    assert name.encode() in ended


@pytest.mark.parametrize("family", ["process_open_fds", "process_max_fds"])
def test_descriptors_are_those_of_the_process_with_the_most(family: str) -> None:
    texts = [_page(family, "gauge", [f"{family} {number}.0"]).encode() for number in (90, 1000)]
    assert sum_metrics(texts).decode() == _page(family, "gauge", [f"{family} 1000.0"])


LABELS = ("name", "version")
SPREAD = Family("took_us", "histogram", LABELS, "How long.", buckets=(10.0, 18.0, 32.5))
COUNTED = Family("asked", "counter", LABELS, "How often.")


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\\']), st.integers(0, 400))))
def test_counts_and_spreads_render_as_the_client_library_does(seen: list[tuple[str, int]]) -> None:
    theirs = CollectorRegistry()
    count, spread = MetricFamily(COUNTED), MetricFamily(SPREAD)
    counter = Counter(COUNTED.name, COUNTED.help, LABELS, registry=theirs)
    histogram = Histogram(SPREAD.name, SPREAD.help, LABELS, buckets=SPREAD.buckets, registry=theirs)
    for name, eighths in seen:
        value = eighths / 8
        for each in (count, counter):
            each.labels(name, "1").inc()
        for every in (spread, histogram):
            every.labels(name, "1").observe(value)

    for is_open, generate in ((False, generate_latest), (True, generate_open)):
        ours = [line for each in (count, spread) for line in render_family(each.row, each.samples(), is_open=is_open)]
        expected = generate(theirs).decode().removesuffix("# EOF\n")
        assert "".join(f"{line}\n" for line in ours) == expected


@pytest.mark.parametrize(
    ("name", "kind", "old"),
    [
        ("ovmstrio_inference_on_loop", "gauge", 'ovmstrio_inline{name="m",version="1"} 1.0'),
        ("ovmstrio_execution_switches", "counter", 'ovmstrio_placement_moves_total{name="m",version="1"} 1.0'),
        ("ovmstrio_cpu_pinned", "gauge", 'ovmstrio_bound_to_cores{name="m",version="1"} 1.0'),
        ("ovmstrio_cpu_pinning_changes", "counter", 'ovmstrio_core_choices_total{name="m",version="1"} 1.0'),
        (
            "ovmstrio_padded_elements",
            "counter",
            'ovmstrio_bucketed_elements_total{name="m",part="padding",version="1"} 2.0',
        ),
        ("ovmstrio_auth_failures", "counter", 'ovmstrio_refused_callers_total{reason="scope"} 1.0'),
        ("ovmstrio_rejected_requests", "counter", 'ovmstrio_refused_requests_total{name="m"} 1.0'),
        (
            "ovmstrio_request_time_seconds",
            "histogram",
            'ovmstrio_request_time_us_sum{interface="gRPC",kind="model"} 20.0',
        ),
        (
            "ovmstrio_batch_wait_time_seconds",
            "histogram",
            'ovmstrio_batch_wait_time_us_bucket{le="32.0",name="m",version="1"} 1.0',
        ),
        ("ovmstrio_node_time_seconds", "histogram", 'ovmstrio_node_time_us_count{name="g",node="n"} 1.0'),
    ],
)
def test_old_names_have_the_old_labels_and_units(metrics: Metrics, name: str, kind: str, old: str) -> None:
    bound = metrics.servable("m", "1")
    bound.set_execution_mode(inline=True, changed=True)
    bound.set_cpu_pinning(to_cores=True, changed=True)
    bound.record_padding("padded", 3, 2)
    bound.queue_time(20e-6)
    metrics.node("g", "n").ran(0.5)
    metrics.refused("scope")
    metrics.rejected(Overloaded("full"), "m")
    metrics.rejected(ServiceMissing("unknown"))
    _timed_call(metrics)
    old_family = old.partition("{")[0]

    for is_open in (False, True):
        assert f"\n{old}\n" in metrics.render(is_open=is_open).decode()
    selected = metrics.render([old_family]).decode()
    assert f"\n{old}\n" in selected
    assert f"{name}{{" not in selected
    assert f" {kind}\n" in selected
    assert old_family.removesuffix("_total") not in metrics.render([name]).decode()


def test_families_may_be_enabled_by_their_old_names() -> None:
    assert matching_families(["ovmstrio_waiting_*"]) == ("ovmstrio_thread_queue_length",)
    assert matching_families(["ovmstrio_request_time_us"]) == ("ovmstrio_request_time_seconds",)


def test_rejections_are_counted_by_reason(metrics: Metrics) -> None:
    errors: dict[ServerError, str] = {
        ServiceMissing("m"): "unknown_name",
        VersionMissing("m"): "not_loaded",
        VersionRetired("m"): "not_loaded",
        ServiceLoading("m"): "not_loaded",
        PayloadTooLarge("m"): "too_large",
        CallerLimited("m"): "over_quota",
        TooManyRequests("m"): "queue_full",
        InvalidRequest("m"): "",
    }
    for error in errors:
        metrics.rejected(error)
    metrics.refused("nothing_shown")
    metrics.refused("not_known")
    metrics.refused("limit")
    expected = Counted(filter(None, errors.values())) + Counted(["unauthenticated"] * 2 + ["over_quota"])
    name = "ovmstrio_rejected_requests_total"
    found = {dict(labels)["reason"]: value for (each, labels), value in _samples(metrics).items() if each == name}
    assert found == expected


def test_idle_models_have_no_series_of_calls_except_those_of_ovms(metrics: Metrics) -> None:
    metrics.servable("m", "1")
    families = {name for name, labels in _samples(metrics) if ("name", "m") in labels}
    assert families == {"ovms_requests_success", "ovms_requests_fail", "ovms_current_requests"}


# Threads, batches and the event loop


def watching() -> Metrics:
    metrics, load = Metrics(), current_loop_utilization()
    metrics.expose_resources(current_resource_registry(), lambda: (tuple(load.iterations), load.iteration_seconds))
    return metrics


def figures(metrics: Metrics, name: str) -> dict[str, float]:
    text = metrics.render().decode()
    found = re.findall(rf'(?m)^ovmstrio_(\w+){{name="{name}"}} (\S+)$', text)
    return {family: float(value) for family, value in found}


async def test_threads_and_waiting_calls_of_a_service_are_counted_and_abandoned_threads_as_stuck() -> None:
    metrics, begun, go = watching(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(WAIT_SECONDS)

    with owned_by("mine"):
        pool = WorkerThreads(limit=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        try:
            job, *_ = [pool.start(wait) for _ in range(3)]
            assert figures(metrics, "mine") == {
                "worker_threads": 1,
                "stuck_threads": 0,
                "thread_queue_length": 2,
                "waiting_calls": 2,
            }
            assert await trio.to_thread.run_sync(begun.wait, WAIT_SECONDS)
            assert not await pool.finish(job, 0)
            assert figures(metrics, "mine")["stuck_threads"] == 1
        finally:
            go.set()
            with trio.CancelScope(shield=True):
                await pool.aclose()
    assert figures(metrics, "mine") == {}


async def test_requests_waiting_for_a_batch_are_counted() -> None:
    metrics, go = watching(), trio.Event()

    async def run(items: Sequence[int]) -> Sequence[int]:
        await go.wait()
        return items

    with owned_by("mine"):
        async with trio.open_nursery() as nursery:
            batcher = Batcher[int, int](run, BatchOptions(max_size=1, timeout_seconds=0))
            await nursery.start(batcher.serve)
            for item in range(3):
                nursery.start_soon(batcher.submit, item)
            await trio.testing.wait_all_tasks_blocked()
            assert figures(metrics, "mine") == {"batch_queued_requests": 2}
            go.set()
            await batcher.aclose()
    assert figures(metrics, "mine") == {}


async def test_turns_of_the_event_loop_are_timed() -> None:
    metrics = watching()
    await trio.lowlevel.checkpoint()
    before = metrics.render(["ovmstrio_event_loop_delay_seconds"]).decode()
    threading.Event().wait(0.06)
    await trio.sleep(0.001)
    after = metrics.render(["ovmstrio_event_loop_delay_seconds"]).decode()

    def longer(text: str) -> float:
        numbers = dict(re.findall(r'_bucket{le="(\S+)"} (\S+)', text))
        return float(numbers["+Inf"]) - float(numbers["0.05"])

    assert longer(after) > longer(before)


@pytest.mark.parametrize(("sizes", "growth"), [((100, 130), 30), ((1000, 900), 0), ((0, 0), None)])
def test_growth_is_the_difference_of_known_sizes(sizes: tuple[int, int], growth: int | None) -> None:
    reads = iter(sizes)
    with MemoryGrowthMeter(lambda: next(reads)).watching() as grown:
        assert grown() == growth
