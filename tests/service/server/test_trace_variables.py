"""OpenTelemetry's variables, one by one: each does in the server what it does everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from ovmstrio.observability.tracing.sampling_variables import sampling_of, warn_of_propagators
from ovmstrio.observability.tracing.trace_context import TraceParent
from tests.service.server.test_traces import ask, infer_body, serving
from tests.support.all_kinds import write_all_kinds
from tests.support.otlp import collecting

if TYPE_CHECKING:
    from pathlib import Path

LOW, HIGH = 1, 2**64 - 1


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_address_headers_and_attributes_are_as_the_variables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Those of traces alone count more than those of all signals."""
    async with collecting() as collector:
        own = f"http://{collector.grpc}" if protocol == "grpc" else f"http://{collector.http}/v1/traces"
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": own,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=cats,x-other=a%20b",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=tests,service.name=unheard",
            "OTEL_SERVICE_NAME": "heard",
            "OTEL_PROPAGATORS": "tracecontext,baggage",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "NO_PROXY": "127.0.0.1",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        async with serving(write_all_kinds(tmp_path)) as server:
            await ask(server, "POST", "/v2/models/model/infer", json=infer_body())
    assert collector.named("POST /v2/models/model/infer").service == "heard"
    assert collector.resource["deployment.environment"] == "tests"
    assert (collector.headers["x-tenant"], collector.headers["x-other"]) == ("cats", "a b")


async def test_all_of_it_is_off_if_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is set."""
    async with collecting() as collector:
        for name, value in {**collector.environment(), "OTEL_SDK_DISABLED": "TRUE"}.items():
            monkeypatch.setenv(name, value)
        async with serving(write_all_kinds(tmp_path)) as server:
            await ask(server, "POST", "/v2/models/model/infer", json=infer_body())
    assert not collector.spans


@pytest.mark.parametrize(
    ("name", "without", "of_sampled", "of_unsampled"),
    [
        ("always_on", (True, True), (True, True), (True, True)),
        ("always_off", (False, False), (False, False), (False, False)),
        ("traceidratio", (True, False), (True, False), (True, False)),
        ("parentbased_always_on", (True, True), (True, True), (False, False)),
        ("parentbased_always_off", (False, False), (True, True), (False, False)),
        ("parentbased_traceidratio", (True, False), (True, True), (False, False)),
        ("", (True, True), (True, True), (False, False)),
        ("jaeger_remote", (True, True), (True, True), (False, False)),
    ],
)
def test_each_sampler_decides_by_parent_and_id(
    name: str, without: tuple[bool, bool], of_sampled: tuple[bool, bool], of_unsampled: tuple[bool, bool]
) -> None:
    """For a trace of a low id, and one of a high one; what is not known samples as the default does."""
    sampling = sampling_of({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": "0.5"})
    parents = (None, TraceParent(1, 1, is_sampled=True), TraceParent(1, 1, is_sampled=False))
    decided = [(sampling.records(LOW, parent), sampling.records(HIGH, parent)) for parent in parents]
    assert decided == [without, of_sampled, of_unsampled]


@pytest.mark.parametrize(
    ("value", "is_told"),
    [
        ("", False),
        ("tracecontext", False),
        ("baggage, tracecontext", False),
        ("b3", True),
        ("tracecontext,b3multi", True),
        ("none", True),
        ("baggage", True),
    ],
)
def test_propagators_that_are_not_spoken_are_warned_about(value: str, is_told: bool) -> None:
    """W3C's is the only one."""
    with capture_logs() as lines:
        warn_of_propagators({"OTEL_PROPAGATORS": value})
    assert bool(lines) == is_told
