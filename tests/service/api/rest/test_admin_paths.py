"""OVMS's administration paths: the state of what is served, its reload, and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import (
    ConfigError,
    FailedPrecondition,
    ModelFailure,
    Problem,
    ServerError,
    VersionsFailure,
)
from ovmstrio.core.http import Headers, HttpRequest
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.metrics import Metrics
from ovmstrio.server.rest_front_end import make_router
from ovmstrio.wire.http.router import Route
from tests.support.pass_through import load_pass_through
from tests.support.peers import peer_at
from tests.unit.api.rest.servers import BODY, Serving, serving_rest

OK = {"error_code": "OK", "error_message": "OK"}
STATUSES = {
    "echo": {
        "model_version_status": [
            {"version": "2", "state": "AVAILABLE", "status": OK},
            {"version": "1", "state": "AVAILABLE", "status": OK},
        ]
    }
}


def _sorted(statuses: dict[str, Any]) -> dict[str, Any]:
    """Bring versions into one order."""
    return {
        name: sorted(model["model_version_status"], key=lambda status: str(status["version"]))
        for name, model in statuses.items()
    }


async def test_the_state_of_every_version_is_told(serving: Serving) -> None:
    """The document is OVMS's."""
    answer = await serving.get("/v1/config")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert _sorted(answer.json()) == _sorted(STATUSES)


async def test_a_version_that_does_not_load_has_its_reason(tmp_path: Path) -> None:
    """The state is OVMS's for a failed load; the reason is an addition."""

    async def load(spec: ModelSpec, version: int, directory: Path) -> Any:
        if version == 2:
            raise ModelFailure("the file is broken \udcff")
        return await load_pass_through(spec, version, directory)

    async with serving_rest(tmp_path, loader=load) as server:
        answer = await server.get("/v1/config")
    by_version = {status["version"]: status for status in answer.json()["echo"]["model_version_status"]}
    assert by_version["2"]["state"] == "LOADING"
    assert by_version["2"]["status"]["error_code"] == "UNKNOWN"
    assert "the file is broken" in by_version["2"]["status"]["reason"]


async def _reload(folder: Path, outcome: bool | ServerError) -> tuple[int, Any]:
    async def reload() -> bool:
        await trio.lowlevel.checkpoint()
        if isinstance(outcome, ServerError):
            raise outcome
        return outcome

    async with serving_rest(folder, reload=reload) as server:
        answer = await server.post("/v1/config/reload", content=b"whatever stands here is ignored")
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("changed", "status"), [(True, 201), (False, 200)])
async def test_a_reload_answers_with_the_statuses(tmp_path: Path, changed: bool, status: int) -> None:
    """The status tells whether anything was reloaded."""
    answered, document = await _reload(tmp_path, changed)
    assert (answered, _sorted(document)) == (status, _sorted(STATUSES))


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
async def test_a_reload_that_fails_says_why_in_the_words_of_ovms(
    tmp_path: Path, error: ServerError, status: int, text: str
) -> None:
    """The status is that of the error's class."""
    assert await _reload(tmp_path, error) == (status, {"error": text})


async def test_metrics_are_prometheus_text(tmp_path: Path) -> None:
    """A request that was answered is counted, and a query string is allowed."""
    async with serving_rest(tmp_path, metrics=Metrics()) as server:
        assert (await server.post("/v2/models/echo/infer", content=BODY)).status_code == 200
        answer = await server.get("/metrics?name[]=ovms_requests_success")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    counted = [line for line in answer.text.splitlines() if 'method="ModelInfer"' in line and "success" in line]
    assert any('interface="REST"' in line and 'name="echo"' in line and line.endswith(" 1.0") for line in counted)


@pytest.mark.parametrize("key", ["match[]", "name[]"])
async def test_scrapers_may_ask_for_families_and_for_gzip(tmp_path: Path, key: str) -> None:
    """Only what is named is answered, histograms whole; who takes gzip gets it, and nobody else."""
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


OPEN = "application/openmetrics-text; version=1.0.0"


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
async def test_scrapers_get_the_format_that_they_like_best(tmp_path: Path, accept: str, kind: str) -> None:
    """OpenMetrics's where it is named and liked no less."""
    async with serving_rest(tmp_path, metrics=Metrics()) as server:
        answer = await server.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith(kind)
    assert answer.text.endswith("# EOF\n") == (kind == OPEN)


def test_histograms_are_there_once_there_is_something_in_them() -> None:
    """A server of many models has none of those that nobody called; counters are at zero from the start."""
    metrics = Metrics()
    metrics.servable("idle", "1")
    assert b'name="idle"' in metrics.render(["ovms_requests_success"])
    assert b'name="idle"' not in metrics.render(["ovms_request_time_us", "ovms_inference_time_us"])
    metrics.servable("idle", "1").inferred(0, 0.5)
    assert b'name="idle"' in metrics.render(["ovms_inference_time_us"])


async def test_metrics_that_are_off_are_no_path(serving: Serving) -> None:
    """The refusal is OVMS's and names the option."""
    answer = await serving.get("/metrics")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Invalid request URL")
    assert "--metrics_enable" in answer.json()["error"]


FORWARDED = (("x-forwarded-for", "127.0.0.1"), ("forwarded", "for=127.0.0.1"))
NOTHING_TO_RELOAD = 501
"""What this server answers whoever may ask for a reload."""


async def _reload_from(plane: DataPlane, client: str, headers: Headers = (), *, allows_remote: bool = False) -> int:
    """Request a reload from an address, and return the status."""
    router = make_router(plane, allows_remote_admin=allows_remote)
    route = router.find("POST", "/v1/config/reload")
    assert isinstance(route, Route)
    answer = await router.answer(route, HttpRequest("POST", route.path, headers=headers, peer=peer_at(client)))
    if answer.status == 403:
        assert "--allow_remote_admin" in answer.content.decode()
    return answer.status


@pytest.mark.parametrize("client", ["192.0.2.7", "2001:db8::7", "::ffff:192.0.2.7", "fe80::1%eth0", "a host"])
async def test_other_machines_change_nothing(serving: Serving, client: str) -> None:
    """Unless they may, whatever they say of themselves."""
    assert await _reload_from(serving.plane, client, FORWARDED) == 403
    assert await _reload_from(serving.plane, client, FORWARDED, allows_remote=True) == NOTHING_TO_RELOAD


@pytest.mark.parametrize("client", ["", "127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
async def test_this_machine_changes_what_it_likes(serving: Serving, client: str) -> None:
    """At a loopback address, or at a Unix socket, whose clients have no name; a proxy there is another matter."""
    assert await _reload_from(serving.plane, client) == NOTHING_TO_RELOAD
    assert await _reload_from(serving.plane, client, FORWARDED) == 403
