from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ovmstrio.auth.key_file import write_key_file
from ovmstrio.core.errors import Unauthenticated
from ovmstrio.telemetry.log_rate_limit import DeniedChangeLog
from ovmstrio.telemetry.logs import configure_logs
from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import triton_module
from tests.support.callers import bearer, entry_of, peer_at
from tests.support.traced_servers import (
    GRAPH_BODY,
    TRACE,
    UNSAMPLED,
    infer_body,
    infer_over_grpc,
    request,
    serving,
    traced,
)

LOGGING = """
import logging

class Handler:
    def handle_post(self, payload):
        logging.getLogger("mine").warning("of the user")
        return 1
"""
FAILING = """
class Handler:
    def handle_post(self, payload):
        raise RuntimeError("the cat is out")
"""


def _access_lines(output: str) -> list[dict[str, Any]]:
    """Find the lines of the access log; a log line that another thread writes may precede one on its line."""
    decoder = json.JSONDecoder()
    found = []
    for begin in re.finditer(r'\{"', output):
        with suppress(json.JSONDecodeError):
            found.append(decoder.raw_decode(output, begin.start())[0])
    return [each for each in found if "protocol" in each]


def _lines(path: Path, *events: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] in events]


async def test_each_request_is_a_line_of_the_access_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_all_kinds(tmp_path, handler=FAILING)
    async with serving(config, access_log="json") as server:
        await request(server, "POST", "/v2/models/model/infer?key=secret", json=infer_body())
        await request(server, "POST", "/v2/models/missing/infer", json=infer_body())
        await request(server, "GET", "/v2/health/live")
        await request(server, "POST", "/handler", json=[1])
        await request(server, "POST", "/v2/models/graph/generate_stream", json=GRAPH_BODY)
        await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], {})
    lines = _access_lines(capfd.readouterr().out)
    assert [(line["protocol"], line["path"], line["status"], line.get("name")) for line in lines] == [
        ("HTTP", "/v2/models/model/infer", 200, "model"),
        ("HTTP", "/v2/models/missing/infer", 404, None),
        ("HTTP", "/v2/health/live", 200, None),
        ("HTTP", "/handler", 500, "handler"),
        ("HTTP", "/v2/models/graph/generate_stream", lines[4]["status"], lines[4].get("name")),
        ("gRPC", "/inference.GRPCInferenceService/ModelInfer", "OK", "model"),
    ]
    assert lines[0]["request_id"] == "r1"
    assert min(lines[0]["sent"], lines[0]["received"], lines[5]["sent"], lines[5]["received"]) > 0
    assert lines[5]["request_id"] == "r2"


def _call_as_reader(address: str) -> None:
    triton = triton_module("grpc")
    with triton.InferenceServerClient(address) as client:
        assert client.get_model_metadata("model", headers=bearer("reader")).name == "model"
    with pytest.raises(triton.InferenceServerException, match="infer:model"):
        infer_over_grpc(address, bearer("reader"))


async def test_access_log_has_the_caller_of_refused_requests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.json"
    write_key_file(keys, [entry_of("reader", "read", "infer:other")])
    async with serving(write_all_kinds(tmp_path), access_log="json", keys_file=keys) as server:
        await trio.to_thread.run_sync(_call_as_reader, server.grpc[0])
        await request(server, "GET", "/v2/models/model", headers=bearer("reader"))
        await request(server, "GET", "/nowhere", headers=bearer("reader"))
    lines = _access_lines(capfd.readouterr().out)

    assert [(line["protocol"], line["status"], line["caller"]) for line in lines] == [
        ("gRPC", "OK", "reader"),
        ("gRPC", "PERMISSION_DENIED", "reader"),
        ("HTTP", 200, "reader"),
        ("HTTP", 400, "reader"),
    ]


async def test_log_lines_of_an_unsampled_call_have_its_trace_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = write_all_kinds(tmp_path, handler=LOGGING), tmp_path / "log"
    configure_logs(level="DEBUG", fmt="json", path=path)
    async with traced(monkeypatch, config) as (_, server):
        await request(server, "POST", "/v2/models/model/infer", json=infer_body(), headers=UNSAMPLED)
        await request(server, "POST", "/handler", json=[1], headers=UNSAMPLED)
    lines = _lines(path, "request", "of the user")
    assert [line["event"] for line in lines] == ["request", "of the user", "request"]
    assert {line["trace_id"] for line in lines} == {TRACE}
    assert lines[0]["request_id"] == "r1"


# Refused changes


OVER_REST = {
    "/v1/config/reload": "POST /v1/config/reload",
    "/v2/repository/models/model/load": "POST /v2/repository/models/<model>/load",
    "/v2/repository/models/model/unload": "POST /v2/repository/models/<model>/unload",
    "/v2/logging": "POST /v2/logging",
    "/v2/systemsharedmemory/region/r/register": "POST /v2/systemsharedmemory/region/<region>/register",
    "/v2/profile": "POST /v2/profile",
    "/console/api/reload": "POST /console/api/reload",
}
_KSERVE = "inference.GRPCInferenceService/"
OVER_GRPC: dict[str, Callable[[Any, dict[str, str]], object]] = {
    "RepositoryModelLoad": lambda client, headers: client.load_model("model", headers=headers),
    "RepositoryModelUnload": lambda client, headers: client.unload_model("model", headers=headers),
    "LogSettings": lambda client, headers: client.update_log_settings({"log_info": True}, headers=headers),
    "SystemSharedMemoryRegister": lambda client, headers: client.register_system_shared_memory(
        "r", "/r", 8, headers=headers
    ),
}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    configure_logs(fmt="json", path=path)
    return path


def _serve(tmp_path: Path) -> Any:
    keys = tmp_path / "keys.json"
    write_key_file(keys, [entry_of("shop", "infer:*", "read")])
    return serving(write_all_kinds(tmp_path), keys_file=keys)


@pytest.mark.parametrize(("caller", "status"), [("", 401), ("stranger", 401), ("shop", 403)])
async def test_refused_change_over_rest_is_logged(tmp_path: Path, log: Path, caller: str, status: int) -> None:
    async with _serve(tmp_path) as server:
        for path in OVER_REST:
            answer = await request(server, "POST", path, json={}, headers=bearer(caller) if caller else {})
            assert answer.status_code == status
    lines, name = _lines(log, "change refused"), caller if status == 403 else ""
    logged = [(line["change"], line["caller"], line["client"], line["level"]) for line in lines]
    assert logged == [(change, name, "127.0.0.1", "warning") for change in OVER_REST.values()]
    assert "POST /v2/repository/models/model/load" in {line.get("about") for line in lines}
    assert "stranger" not in str(lines)


@pytest.mark.parametrize("caller", ["", "shop"])
async def test_refused_change_over_grpc_is_logged(tmp_path: Path, log: Path, caller: str) -> None:
    triton = triton_module("grpc")
    headers = bearer(caller) if caller else {}

    def call_all(address: str) -> None:
        with triton.InferenceServerClient(address) as client:
            for each in OVER_GRPC.values():
                with pytest.raises(triton.InferenceServerException, match=r"UNAUTHENTICATED|PERMISSION_DENIED"):
                    each(client, headers)

    async with _serve(tmp_path) as server:
        await trio.to_thread.run_sync(call_all, server.grpc[0])
    logged = [(line["change"], line["caller"], line["client"]) for line in _lines(log, "change refused")]
    names = {name: f"{_KSERVE}{name}" for name in OVER_GRPC}
    if caller:
        names["LogSettings"] = "log settings"
    assert logged == [(name, caller, "127.0.0.1") for name in names.values()]


async def test_repeated_refusals_are_counted(tmp_path: Path, log: Path) -> None:
    async with _serve(tmp_path) as server:
        for number in range(20):
            await request(server, "POST", f"/v2/repository/models/m{number}/load", json={})
    (first,) = _lines(log, "change refused")
    assert first["about"] == "POST /v2/repository/models/m0/load"
    (repeated,) = _lines(log, "fault repeated")
    assert (repeated["fault"], repeated["peer"], repeated["times"]) == ("change refused", "127.0.0.1", 19)


async def test_refusals_of_many_hosts_are_counted_together(log: Path) -> None:
    denials = DeniedChangeLog()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(denials.log_repetitions)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(5000):
            error = Unauthenticated("authentication required")
            denials.log_denied("reload", error, client=peer_at(f"10.0.{number // 250}.{number % 250}").address)
        nursery.cancel_scope.cancel()
    lines, repeated = _lines(log, "change refused"), _lines(log, "fault repeated")
    assert len(lines) <= 201
    assert len(lines) + sum(each["times"] for each in repeated) == 5000
