from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.core.errors import (
    ConfigError,
    FailedPrecondition,
    ModelFailure,
    Problem,
    ServerError,
    VersionsFailure,
)
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.telemetry.metrics import Metrics
from ovmstrio.transport.http.router import Route
from tests.support.callers import peer_at
from tests.unit.protocols.servers import BODY, Serving, load_version_1, serving_rest

OK = {"error_code": "OK", "error_message": "OK"}
VERSIONS = [{"version": version, "state": "AVAILABLE", "status": OK} for version in ("2", "1")]
OPEN = "application/openmetrics-text; version=1.0.0"
NOTHING_TO_RELOAD = 501


async def test_the_state_of_every_version_is_listed(serving: Serving) -> None:
    answer = await serving.get("/v1/config")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert _versions(answer.json()) == VERSIONS


def _versions(document: dict[str, Any]) -> list[Any]:
    assert set(document) == {"echo"}
    found: list[Any] = document["echo"]["model_version_status"]
    return sorted(found, key=lambda status: str(status["version"]), reverse=True)


async def test_a_failed_version_is_listed_with_its_reason(tmp_path: Path) -> None:
    async with serving_rest(tmp_path, loader=load_version_1) as server:
        failed, _ = _versions((await server.get("/v1/config")).json())
    assert (failed["version"], failed["state"], failed["status"]["error_code"]) == ("2", "LOADING", "UNKNOWN")
    assert "the file is <b>broken</b>" in failed["status"]["reason"]


async def _reload(folder: Path, outcome: bool | ServerError) -> tuple[int, Any]:
    async def reload() -> bool:
        await trio.lowlevel.checkpoint()
        if isinstance(outcome, ServerError):
            raise outcome
        return outcome

    async with serving_rest(folder, reload=reload) as server:
        answer = await server.post("/v1/config/reload", content=b"ignored")
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("changed", "status"), [(True, 201), (False, 200)])
async def test_a_reload_is_answered_with_the_state(tmp_path: Path, changed: bool, status: int) -> None:
    answered, document = await _reload(tmp_path, changed)
    assert (answered, _versions(document)) == (status, VERSIONS)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (FailedPrecondition("a typo"), 412, "Reloading config file failed. Check server logs for more info: a typo"),
        (ModelFailure("b is bad"), 500, "Reloading config file failed. Check server logs for more info: b is bad"),
        (VersionsFailure("b is"), 500, "Reloading models versions failed. Check server logs for more info: b is"),
        (ConfigError([Problem("it is not there", "c")]), 500, "Config file not found or cannot open."),
        (ServerError("it cannot be read"), 500, "it cannot be read"),
    ],
)
async def test_a_failed_reload_has_the_text_of_ovms(tmp_path: Path, error: ServerError, status: int, text: str) -> None:
    assert await _reload(tmp_path, error) == (status, {"error": text})


async def test_metrics_are_prometheus_text_of_the_requested_families(tmp_path: Path) -> None:
    async with serving_rest(tmp_path, metrics=Metrics()) as server:
        assert (await server.post("/v2/models/echo/infer", content=BODY)).status_code == 200
        answer = await server.get("/metrics?name[]=ovms_requests_success")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    counted = [line for line in answer.text.splitlines() if 'method="ModelInfer"' in line and "success" in line]
    assert any('interface="REST"' in line and 'name="echo"' in line and line.endswith(" 1.0") for line in counted)


@pytest.mark.parametrize("key", ["match[]", "name[]"])
async def test_requested_families_are_complete_and_compressed_on_request(tmp_path: Path, key: str) -> None:
    async with serving_rest(tmp_path, metrics=Metrics()) as server:
        await server.post("/v2/models/echo/infer", content=BODY)
        path = f"/metrics?{key}=ovms_request_time_us&{key}=ovmstrio_ready"
        plain = await server.get(path, headers={"accept-encoding": "identity"})
        packed = await server.get(path, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.text == plain.text
    families = {line.split()[2] for line in plain.text.splitlines() if line.startswith("# TYPE")}
    assert families == {"ovms_request_time_us", "ovmstrio_ready"}
    assert 'ovms_request_time_us_count{interface="REST",name="echo",version="2"} 1.0' in plain.text
    assert "ovms_request_time_us_bucket{" in plain.text


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [
        ("gzip, deflate, br", True),
        ("GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("identity;q=1, *;q=0", False),
        ("identity, gzip;q=0.5", False),
        ("x-gzip-ng", False),
    ],
)
async def test_metrics_are_compressed_only_if_gzip_has_a_weight(tmp_path: Path, accepted: str, is_packed: bool) -> None:
    async with serving_rest(tmp_path, metrics=Metrics()) as server:
        answer = await server.get("/metrics?name[]=ovmstrio_ready", headers={"accept-encoding": accepted})
    assert answer.headers.get("content-encoding") == ("gzip" if is_packed else None)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (OPEN, OPEN),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.1", OPEN),
        ("text/plain;version=0.0.4, application/openmetrics-text;q=0.3", "text/plain"),
        ("application/openmetrics-text;q=0", "text/plain"),
        ("*/*", "text/plain"),
    ],
)
async def test_metrics_have_the_accepted_format_of_the_highest_quality(tmp_path: Path, accept: str, kind: str) -> None:
    async with serving_rest(tmp_path, metrics=Metrics()) as server:
        answer = await server.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith(kind)
    assert answer.text.endswith("# EOF\n") == (kind == OPEN)


def test_histograms_are_rendered_after_their_first_value() -> None:
    metrics = Metrics()
    metrics.servable("idle", "1")
    assert b'name="idle"' in metrics.render(["ovms_requests_success"])
    assert b'name="idle"' not in metrics.render(["ovms_request_time_us", "ovms_inference_time_us"])
    metrics.servable("idle", "1").inferred(0, 0.5)
    assert b'name="idle"' in metrics.render(["ovms_inference_time_us"])


async def test_disabled_metrics_are_refused_with_a_hint(serving: Serving) -> None:
    answer = await serving.get("/metrics")
    error = answer.json()["error"]
    assert (answer.status_code, error.startswith("Invalid request URL"), "--metrics-enable" in error) == (
        400,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("client", "allows_remote", "status"),
    [("192.0.2.7", False, 403), ("192.0.2.7", True, NOTHING_TO_RELOAD), ("127.0.0.1", False, NOTHING_TO_RELOAD)],
)
async def test_a_reload_by_a_remote_client_may_be_allowed(
    serving: Serving, client: str, allows_remote: bool, status: int
) -> None:
    router = make_rest_router(serving.plane, allows_remote_admin=allows_remote)
    route = router.find("POST", "/v1/config/reload")
    assert isinstance(route, Route)
    answer = await router.answer(route, HttpRequest("POST", route.path, peer=peer_at(client)))
    assert answer.status == status
    assert ("--allow-remote-admin" in answer.content.decode()) == (status == 403)
