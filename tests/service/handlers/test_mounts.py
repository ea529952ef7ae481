from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from ovmstrio.server.running import Running
from ovmstrio.server.server import serve
from ovmstrio.server.settings import ServerSettings
from tests.support.projects import write_project
from tests.support.waits import WAIT_SECONDS

HANDLER = """
class Handler:
    def __init__(self, config):
        self.config = config

    def handle_post(self, payload, query_params):
        if payload == "fail":
            raise ValueError("a secret")
        return {"got": payload, "config": self.config, "query": dict(query_params)}

    def handle_get(self):
        yield "a"
        yield "b"
"""
MODELS = """
class Handler:
    def __init__(self, model_client):
        pass
    def load_model(self, model_path):
        return model_path
    def handle_get(self):
        return None
"""


def _config(folder: Path, *names: str) -> Path:
    path = folder / "config.json"
    entries = [{"name": name, "path": name} for name in names]
    path.write_text(json.dumps({"model_config_list": [], "handler_config_list": entries}))
    return path


@asynccontextmanager
async def _serving(config: Path, *, metrics_enable: bool = False) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    settings = ServerSettings(
        config_path=config,
        port=0,
        rest_port=0,
        rest_bind_address=f"unix:{config.parent}/rest",
        log_level="ERROR",
        metrics_enable=metrics_enable,
    )
    async with trio.open_nursery() as nursery:
        running = await nursery.start(_serve, settings)
        transport = httpx.AsyncHTTPTransport(uds=f"{config.parent}/rest")
        async with httpx.AsyncClient(transport=transport, base_url="http://h", timeout=WAIT_SECONDS) as client:
            await running.plane.registry.wait_loaded()
            yield running, client
        nursery.cancel_scope.cancel()


async def _serve(settings: ServerSettings, *, task_status: trio.TaskStatus[Running]) -> None:
    await serve(settings, handle_signals=False, task_status=task_status)


async def test_handlers_are_served_below_their_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_project(tmp_path / name, HANDLER, config={"name": name})
    async with _serving(_config(tmp_path, "one", "two")) as (_, client):
        for name in ("one", "two"):
            answer = await client.post(f"/{name}?a=1", json=[1])
            assert answer.json() == {"got": [1], "config": {"name": name}, "query": {"a": "1"}}
            assert answer.headers["access-control-allow-origin"] == "*"
            assert (await client.get(f"/{name}")).text == "ab"
            assert (await client.put(f"/{name}")).status_code == 405
            assert (await client.options(f"/{name}")).status_code == 204
            answer = await client.post(f"/{name}", json="fail")
            assert (answer.status_code, answer.text) == (500, "internal server error")
        assert (await client.get("/v2/health/ready")).status_code == 200
        assert (await client.post("/three")).status_code == 400


async def test_a_handler_has_metadata_but_no_tensors(tmp_path: Path) -> None:
    write_project(tmp_path / "one", HANDLER)
    async with _serving(_config(tmp_path, "one")) as (_, client):
        assert (await client.get("/v2/models/one")).json()["platform"] == "handler"
        assert (await client.get("/v2/models/one/ready")).status_code == 200
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT8", "data": [1]}]}
        answer = await client.post("/v2/models/one/infer", json=body)
        assert answer.status_code == 501
        assert "call it at /one" in answer.json()["error"]


async def _reload(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/config/reload")).status_code == 201


@pytest.mark.parametrize("headers", [{}, {"TE": "trailers"}], ids=["fast", "application"])
async def test_a_handler_that_fails_to_load_makes_the_server_unready(tmp_path: Path, headers: dict[str, str]) -> None:
    async def statuses() -> list[int]:
        posts = [await client.post(path, json=1, headers=headers) for path in ("/good", "/bad")]
        return [(await client.get("/v2/health/ready")).status_code, *(each.status_code for each in posts)]

    write_project(tmp_path / "good", HANDLER)
    write_project(tmp_path / "bad", "class Handler:\n    def __init__(self): raise ValueError('no luck')\n")
    async with _serving(_config(tmp_path, "good", "bad")) as (_, client):
        assert await statuses() == [503, 200, 503]
        write_project(tmp_path / "bad", HANDLER)
        await _reload(client)
        assert await statuses() == [200, 200, 200]


async def test_a_reload_replaces_changed_handlers_and_removes_others(tmp_path: Path) -> None:
    write_project(tmp_path / "one", HANDLER, config={"version": 1})
    config = _config(tmp_path, "one")
    async with _serving(config) as (_, client):
        write_project(tmp_path / "one", HANDLER, config={"version": 2})
        await _reload(client)
        assert (await client.post("/one", json=1)).json()["config"] == {"version": 2}
        _config(tmp_path)
        await _reload(client)
        assert (await client.post("/one", json=1)).status_code == 400


async def test_a_handler_lists_its_models(tmp_path: Path) -> None:
    write_project(tmp_path / "one", HANDLER)
    file = write_project(tmp_path / "two", MODELS, multi_model_reloading={"dir": "models"})
    version = file.parent / "models" / "iris" / "3"
    version.mkdir(parents=True)
    (version / "model.pkl").touch()
    async with _serving(_config(tmp_path, "one", "two")) as (_, client):
        assert (await client.get("/one/info")).json() == {}
        assert (await client.get("/two/info")).json()["model_metadata"]["iris"]["versions"] == ["3"]
        for path in ("/two/other", "/three/info"):
            assert (await client.get(path)).status_code == 400


async def test_batch_sizes_and_waiting_times_are_counted(tmp_path: Path) -> None:
    batched = "class Handler:\n    def handle_post(self, payload):\n        return payload\n"
    write_project(tmp_path / "one", batched, server_side_batching={"max_batch_size": 2, "batch_interval_seconds": 3600})
    async with _serving(_config(tmp_path, "one"), metrics_enable=True) as (_, client):

        async def post(number: int) -> None:
            assert (await client.post("/one", json=number)).json() == number

        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(post, number)
        text = (await client.get("/metrics")).text
    assert 'ovmstrio_batch_size_sum{name="one",version="1"} 2.0' in text
    assert 'ovmstrio_batch_wait_time_seconds_count{name="one",version="1"} 2.0' in text


async def test_a_handler_with_several_processes_is_refused_with_a_hint(tmp_path: Path) -> None:
    write_project(tmp_path / "one", HANDLER, processes=2)
    async with _serving(_config(tmp_path, "one")) as (running, _):
        (status,) = running.plane.statuses()["one"]
    assert "processes" in status.reason
    assert "serve the project alone" in status.reason
