from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trio
import trio.testing
import trustme
from google.protobuf.wrappers_pb2 import StringValue
from structlog.testing import capture_logs

from ovmstrio.handlers.handler_loading import LoadedHandler
from ovmstrio.handlers.handler_service import HandlerService
from ovmstrio.server.plan import plan_project
from ovmstrio.server.running import Running
from ovmstrio.server.server import serve_plan
from ovmstrio.server.worker_context import WorkerProcessContext
from tests.support.ports import free_ports
from tests.support.projects import make_project, write_project, written
from tests.support.system_servers import write_config
from tests.support.traced_servers import request, serving
from tests.support.waits import WAIT_SECONDS

HTTP_HANDLER = """
import threading

class Handler:
    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()

    def handle_get(self):
        return "here"

    def handle_post(self, payload):
        return len(payload)

    def handle_put(self):
        self.begun.set()
        self.go.wait(60)
        return "done"
"""
GRPC_HANDLER = """
class Handler:
    def __init__(self, module_proto_pb2):
        self.pb = module_proto_pb2

    def Say(self, payload):
        return self.pb.Text(value=payload.value + "!")
"""
PROTO = """
syntax = "proto3";
package {package};
message Text {{ string value = 1; }}
service Talk {{ rpc Say (Text) returns (Text); }}
"""


@dataclass
class _Served:
    """Served project that ends when the test sets ``end``."""

    running: Running
    end: trio.Event
    gently: list[bool] = field(default_factory=list)
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def handler(self) -> Any:
        (name,) = self.running.plane.registry.names_of("handler")
        service = self.running.plane.registry.peek(name)
        assert isinstance(service, HandlerService)
        assert isinstance(service.handler, LoadedHandler)
        return service.handler.instance

    async def request(
        self, method: str = "GET", path: str = "/", *, tls: ssl.SSLContext | None = None, **options: Any
    ) -> Any:
        url = f"http{'' if tls is None else 's'}://{self.running.rest[0]}{path}"
        verify: Any = True if tls is None else tls
        async with httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False, verify=verify) as client:
            return await client.request(method, url, **options)

    async def call_grpc(self, package: str, value: str, credentials: grpc.ChannelCredentials | None = None) -> str:
        address, options = self.running.grpc[0], [("grpc.use_local_subchannel_pool", 1)]
        secure = credentials and grpc.secure_channel(address, credentials, options)
        with secure or grpc.insecure_channel(address, options) as channel:
            return await say(channel, package, value)


async def say(channel: Any, package: str, value: str) -> str:
    method = channel.unary_unary(
        f"/{package}.Talk/Say",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )
    answer = await trio.to_thread.run_sync(partial(method, StringValue(value=value), timeout=WAIT_SECONDS))
    return str(answer.value)


@asynccontextmanager
async def _serving(
    folder: Path, code: str = HTTP_HANDLER, *, package: str = "", **options: Any
) -> AsyncIterator[_Served]:
    keys = {}
    if package:
        written(folder, "talk.proto", PROTO.format(package=package))
        keys["protobuf_path"] = "talk.proto"
    project = make_project(folder, code, **keys)
    where = {"grpc_bind_address": "127.0.0.1", "rest_bind_address": "127.0.0.1"}
    plan = plan_project(project, {"port": 0, **where, **options})
    end = trio.Event()

    async def serve(*, task_status: trio.TaskStatus[Running]) -> None:
        gently = await serve_plan(
            plan, WorkerProcessContext(wait_drain=end.wait), handle_signals=False, task_status=task_status
        )
        served.gently.append(gently)
        served.ended.set()

    async with trio.open_nursery() as nursery:
        served = _Served(await nursery.start(serve), end)
        yield served
        nursery.cancel_scope.cancel()


async def test_drain_accepts_connections_during_the_drain_delay(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    file = tmp_path / "ready"
    async with _serving(tmp_path / "project", drain_delay=5, readiness_file=file) as served:
        assert file.exists()
        assert (await served.request(path="/v2/health/ready")).status_code == 200
        served.end.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not file.exists()
        mock_clock.jump(4.9)
        assert (await served.request(path="/v2/health/ready")).status_code == 503
        assert (await served.request()).text == "here"
        mock_clock.jump(0.2)
        # Idle connections and listeners are closed after some further seconds.
        mock_clock.rate = 20
        await served.ended.wait()
        assert served.gently == [True]
        with pytest.raises(httpx.ConnectError):
            await served.request()


@pytest.mark.parametrize(
    ("drained_seconds", "answers", "is_gentle"),
    [pytest.param(6.9, ["done"], True, id="in time"), pytest.param(7.1, [], False, id="too late")],
)
async def test_drain_waits_for_calls_until_drain_seconds(
    tmp_path: Path, mock_clock: trio.testing.MockClock, drained_seconds: float, answers: list[str], *, is_gentle: bool
) -> None:
    received: list[str] = []

    async def request() -> None:
        with suppress(httpx.TransportError):
            received.append((await served.request("PUT")).text)

    with capture_logs() as logs:
        async with _serving(tmp_path / "project", drain_seconds=7) as served, trio.open_nursery() as nursery:
            nursery.start_soon(request)
            handler = served.handler
            assert await trio.to_thread.run_sync(handler.begun.wait, WAIT_SECONDS)
            served.end.set()
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(drained_seconds)
            await trio.testing.wait_all_tasks_blocked()
            handler.go.set()
            await served.ended.wait()
    assert (received, served.gently) == (answers, [is_gentle])
    cut = [(line["count"], line["drain_seconds"]) for line in logs if line["event"] == "requests cut"]
    assert cut == ([] if is_gentle else [(1, 7)])


@pytest.mark.parametrize("package", ["", "tls_alone"], ids=["http", "grpc"])
async def test_tls_applies_to_both_protocols(tmp_path: Path, package: str) -> None:
    authority, file, context = trustme.CA(), tmp_path / "server.pem", ssl.create_default_context()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    authority.configure_trust(context)
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    code = GRPC_HANDLER if package else HTTP_HANDLER
    grpc_port, rest_port = free_ports(2)
    options: dict[str, Any] = {"port": grpc_port, "rest_port": rest_port, "tls_cert": file, "tls_key": file}
    async with _serving(tmp_path / "project", code, package=package, **options) as served:
        assert (await served.request(path="/v2/health/ready", tls=context)).status_code == 200
        if package:
            assert await served.call_grpc(package, "hey", credentials) == "hey!"
        else:
            assert (await served.request(tls=context)).text == "here"
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                await served.call_grpc("tls_none", "hey", credentials)
        with pytest.raises(httpx.TransportError):
            await served.request()
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            await served.call_grpc(package or "tls_none", "hey")


@pytest.mark.parametrize(("package", "interface"), [("", "REST"), ("counted", "gRPC")])
async def test_metrics_count_calls(tmp_path: Path, package: str, interface: str) -> None:
    code = GRPC_HANDLER if package else HTTP_HANDLER
    (rest_port,) = free_ports(1) if package else (0,)
    async with _serving(tmp_path / "project", code, package=package, rest_port=rest_port) as served:
        for _ in range(3):
            await (served.call_grpc(package, "a") if package else served.request())
        text = (await served.request(path="/metrics")).text
    counts = [line for line in text.splitlines() if line.startswith("ovms_requests_success{") and interface in line]
    assert [line.rsplit(" ", 1)[1] for line in counts] == ["3.0"]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-type": "application/json"}, b'{"row": [1, 2]}', 200),
        ({}, b'{"row": [1, 2]}', 415),
        ({}, b'  [{"row": 1}]', 415),
        ({}, b"\x00\x01", 500),
        ({}, b"{no JSON", 500),
        ({"content-type": "application/octet-stream"}, b'{"row": [1, 2]}', 500),
        ({}, b"[5]", 415),
    ],
)
async def test_json_without_a_content_type_that_a_handler_cannot_take_is_refused_with_a_hint(
    tmp_path: Path, headers: dict[str, str], body: bytes, status: int
) -> None:
    code = "class Handler:\n    def handle_post(self, payload):\n        return len(payload['row'])\n"
    async with _serving(tmp_path / "project", code) as served:
        answer = await served.request("POST", content=body, headers=headers)
    assert answer.status_code == status
    assert ("send content-type: application/json" in answer.text) == (status == 415)
    if status == 200:
        assert answer.json() == 2


async def test_a_handler_that_takes_bytes_gets_json_without_a_content_type_as_sent(tmp_path: Path) -> None:
    code = "class Handler:\n    def handle_post(self, payload):\n        return payload[::-1]\n"
    async with _serving(tmp_path / "project", code) as served:
        assert (await served.request("POST", content=b"[12]")).content == b"]21["


async def test_metrics_can_be_disabled(tmp_path: Path) -> None:
    async with _serving(tmp_path / "project", metrics_enable=False) as served:
        assert (await served.request(path="/metrics")).status_code == 404


async def test_max_message_size_applies_to_both_protocols(tmp_path: Path) -> None:
    large: dict[str, Any] = {"content": b'"' + b"x" * 4000 + b'"', "headers": {"content-type": "application/json"}}
    async with _serving(tmp_path / "http", max_message_size=2048) as served:
        assert (await served.request("POST", json="few")).json() == 3
        assert (await served.request("POST", **large)).status_code == 413
    async with _serving(tmp_path / "grpc", GRPC_HANDLER, package="small", max_message_size=2048) as served:
        assert await served.call_grpc("small", "few") == "few!"
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            await served.call_grpc("small", "x" * 4000)
    async with _serving(tmp_path / "default") as served:
        size = 65 * 2**20
        large["content"] = b'"' + b"x" * size + b'"'
        assert (await served.request("POST", **large)).json() == size


async def test_allowed_origins_restrict_browsers(tmp_path: Path) -> None:
    async with _serving(tmp_path / "project", allowed_origins="http://a, http://b") as served:
        headers = {"origin": "http://b", "access-control-request-method": "POST"}
        preflight = await served.request("OPTIONS", headers=headers)
        assert preflight.headers["access-control-allow-origin"] == "http://b"
        answer = await served.request(headers={"origin": "http://a"})
        assert (answer.text, answer.headers["access-control-allow-origin"]) == ("here", "http://a")
        assert "access-control-allow-origin" not in (await served.request(headers={"origin": "http://c"})).headers
    async with _serving(tmp_path / "project") as served:
        assert (await served.request(headers={"origin": "http://c"})).headers["access-control-allow-origin"] == "*"


async def test_calls_are_lines_of_the_request_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with capture_logs() as logs:
        async with _serving(tmp_path / "http") as served:
            await served.request()
        async with _serving(tmp_path / "grpc", GRPC_HANDLER, package="logged") as served:
            await served.call_grpc("logged", "a")
    seen = [(line["kind"], line["interface"], line["code"]) for line in logs if line["event"] == "request"]
    assert seen == [("handler", "REST", "OK"), ("handler", "gRPC", "OK")]


async def test_files_of_a_project_are_not_watched_by_default(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with _serving(tmp_path / "project") as served:
        before = served.handler
        written(tmp_path / "project", "handler.py", HTTP_HANDLER.replace("here", "there"))
        mock_clock.jump(60)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert (await served.request()).text == "here"
        assert served.handler is before


@pytest.mark.parametrize("debug", [False, True])
async def test_debug_returns_errors_to_callers(tmp_path: Path, debug: bool) -> None:
    code = "class Handler:\n    def handle_get(self): raise ValueError('a secret')\n"
    async with _serving(tmp_path / "project", code, debug=debug) as served:
        answer = await served.request()
        assert answer.status_code == 500
        assert ("ValueError: a secret" in answer.text) is debug


def _configure(folder: Path, *names: str) -> Path:
    return write_config(folder, handler_config_list=[{"name": name, "path": name} for name in names])


async def test_reload_adds_and_removes_grpc_services_of_handlers(tmp_path: Path) -> None:
    write_project(tmp_path / "echo", "class Handler:\n    def handle_post(self, payload): return payload\n")
    written(tmp_path / "talk", "talk.proto", PROTO.format(package="added_by_reload"))
    write_project(tmp_path / "talk", GRPC_HANDLER, protobuf_path="talk.proto")
    async with serving(_configure(tmp_path, "echo"), file_system_poll_wait_seconds=0) as server:

        async def reload(*names: str) -> None:
            _configure(tmp_path, *names)
            assert (await request(server, "POST", "/v1/config/reload")).status_code == 201
            assert (await request(server, "POST", "/echo", json=[1])).json() == [1]

        with grpc.insecure_channel(server.grpc[0]) as channel:
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                await say(channel, "added_by_reload", "a")
            await reload("echo", "talk")
            assert await say(channel, "added_by_reload", "b") == "b!"
            await reload("echo")
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                await say(channel, "added_by_reload", "c")
