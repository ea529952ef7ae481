"""The settings of the server hold for a project that is served alone, over HTTP and gRPC."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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

from ovmstrio.runtimes.handlers.handler import LoadedHandler
from ovmstrio.runtimes.handlers.mounting import HandlerServable
from ovmstrio.server.hosting import Hosting
from ovmstrio.server.life import serve_plan
from ovmstrio.server.project_plan import plan_project
from ovmstrio.server.running import Running
from tests.support.projects import make_project, written

PATIENCE_SECONDS = 60
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
class Served:
    running: Running
    end: trio.Event
    gently: list[bool] = field(default_factory=list)
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def handler(self) -> Any:
        (name,) = self.running.plane.registry.names_of("handler")
        service = self.running.plane.registry.peek(name)
        assert isinstance(service, HandlerServable)
        assert isinstance(service.handler, LoadedHandler)
        return service.handler.instance

    async def ask(
        self, verb: str = "GET", path: str = "/", *, tls: ssl.SSLContext | None = None, **options: Any
    ) -> Any:
        address = f"http{'' if tls is None else 's'}://{self.running.rest[0]}"
        verify: Any = True if tls is None else tls
        async with httpx.AsyncClient(
            base_url=address, timeout=PATIENCE_SECONDS, trust_env=False, verify=verify
        ) as client:
            return await client.request(verb, path, **options)

    async def say(self, package: str, value: str, credentials: grpc.ChannelCredentials | None = None) -> str:
        def call() -> str:
            address, options = self.running.grpc[0], [("grpc.use_local_subchannel_pool", 1)]
            channel = (
                grpc.secure_channel(address, credentials, options)
                if credentials
                else grpc.insecure_channel(address, options)
            )
            with channel:
                method = channel.unary_unary(
                    f"/{package}.Talk/Say",
                    request_serializer=StringValue.SerializeToString,
                    response_deserializer=StringValue.FromString,
                )
                return str(method(StringValue(value=value), timeout=PATIENCE_SECONDS).value)

        return await trio.to_thread.run_sync(call)


@asynccontextmanager
async def serving(
    folder: Path, code: str = HTTP_HANDLER, *, package: str = "", **options: Any
) -> AsyncIterator[Served]:
    """Serve a project with options of the command line until the block ends."""
    keys = {}
    if package:
        written(folder, "talk.proto", PROTO.format(package=package))
        keys["protobuf_path"] = "talk.proto"
    project = make_project(folder, code, **keys)
    where = {"grpc_bind_address": "127.0.0.1", "rest_bind_address": "127.0.0.1"}
    plan = plan_project(project, {"port": 0, **where, **options})
    end = trio.Event()

    async def serve(*, task_status: trio.TaskStatus[Running]) -> None:
        gently = await serve_plan(plan, Hosting(until=end.wait), handle_signals=False, task_status=task_status)
        served.gently.append(gently)
        served.ended.set()

    async with trio.open_nursery() as nursery:
        served = Served(await nursery.start(serve), end)
        yield served
        nursery.cancel_scope.cancel()


async def test_a_drain_waits_for_those_who_send_calls(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """Not ready at once, it answers new connections until ``drain_delay`` is over, and ends gently."""
    file = tmp_path / "ready"
    async with serving(tmp_path / "project", drain_delay=5, readiness_file=file) as served:
        assert file.exists()
        assert (await served.ask(path="/v2/health/ready")).status_code == 200
        served.end.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not file.exists()
        mock_clock.jump(4.9)
        assert (await served.ask(path="/v2/health/ready")).status_code == 503
        assert (await served.ask()).text == "here"
        mock_clock.jump(0.2)
        # Connections that idle, and listeners, have some time of their own.
        mock_clock.rate = 20
        await served.ended.wait()
        assert served.gently == [True]
        with pytest.raises(httpx.ConnectError):
            await served.ask()


async def test_a_drain_lets_calls_end(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """Those that end before ``drain_seconds`` are over are answered."""
    async with serving(tmp_path / "project", drain_seconds=7) as served, trio.open_nursery() as nursery:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append((await served.ask("PUT")).text)

        nursery.start_soon(ask)
        handler = served.handler
        assert await trio.to_thread.run_sync(handler.begun.wait, PATIENCE_SECONDS)
        served.end.set()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(6.9)
        handler.go.set()
        await served.ended.wait()
    assert (answers, served.gently) == (["done"], [True])


async def test_a_drain_cuts_what_does_not_end(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """After ``drain_seconds``; the log counts them, and the end was not gentle."""
    with capture_logs() as logs:
        async with serving(tmp_path / "project", drain_seconds=7) as served, trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(httpx.TransportError):
                    await served.ask("PUT")

            nursery.start_soon(ask)
            handler = served.handler
            assert await trio.to_thread.run_sync(handler.begun.wait, PATIENCE_SECONDS)
            served.end.set()
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(7.1)
            await trio.testing.wait_all_tasks_blocked()
            handler.go.set()
            await served.ended.wait()
    assert served.gently == [False]
    assert [(line["count"], line["drain_seconds"]) for line in logs if line["event"] == "requests cut"] == [(1, 7)]


@pytest.fixture
def authority() -> trustme.CA:
    """What certificates are signed by."""
    return trustme.CA()


def _tls(folder: Path, authority: trustme.CA) -> dict[str, Path]:
    certificate = authority.issue_cert("127.0.0.1")
    key, chain = folder / "key.pem", folder / "chain.pem"
    certificate.private_key_pem.write_to_path(key)
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    return {"tls_cert": chain, "tls_key": key}


@pytest.mark.parametrize("package", ["", "tls_alone"], ids=["http", "grpc"])
async def test_tls_is_that_of_both_protocols(tmp_path: Path, authority: trustme.CA, package: str) -> None:
    """Whichever the project is called over, and the other one beside it; nobody gets in without."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    code = GRPC_HANDLER if package else HTTP_HANDLER
    options = _tls(tmp_path, authority)
    async with serving(tmp_path / "project", code, package=package, rest_port=0, **options) as served:
        assert (await served.ask(path="/v2/health/ready", tls=context)).status_code == 200
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        if package:
            assert await served.say(package, "hey", credentials) == "hey!"
        else:
            assert (await served.ask(tls=context)).text == "here"
            with pytest.raises(grpc.RpcError) as unknown:
                await served.say("tls_none", "hey", credentials)
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(httpx.TransportError):
            await served.ask()
        with pytest.raises(grpc.RpcError) as refused:
            await served.say(package or "tls_none", "hey")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_metrics_count_the_calls_of_a_project(tmp_path: Path) -> None:
    """At /metrics of its port, beside its own routes."""
    async with serving(tmp_path / "project") as served:
        name = next(iter(served.running.plane.registry.names_of("handler")))
        for _ in range(3):
            assert (await served.ask()).status_code == 200
        text = (await served.ask(path="/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("ovms_requests_success{")]
    assert [line.rsplit(" ", 1)[1] for line in lines if f'name="{name}"' in line] == ["3.0"]


async def test_metrics_of_a_project_over_grpc_have_their_port(tmp_path: Path) -> None:
    """That of HTTP, if it has one."""
    async with serving(tmp_path / "project", GRPC_HANDLER, package="counted", rest_port=0) as served:
        assert await served.say("counted", "a") == "a!"
        text = (await served.ask(path="/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("ovms_requests_success{")]
    assert [line.rsplit(" ", 1)[1] for line in lines if 'interface="gRPC"' in line] == ["1.0"]


async def test_metrics_can_be_turned_off(tmp_path: Path) -> None:
    """The path is the project's then, as any other."""
    async with serving(tmp_path / "project", metrics_enable=False) as served:
        assert (await served.ask(path="/metrics")).status_code == 404


async def test_large_messages_are_refused_if_asked_for(tmp_path: Path) -> None:
    """By both protocols, and none by default that the other servers would refuse."""
    large: dict[str, Any] = {"content": b'"' + b"x" * 4000 + b'"', "headers": {"content-type": "application/json"}}
    async with serving(tmp_path / "http", max_message_size=2048) as served:
        assert (await served.ask("POST", json="few")).json() == 3
        assert (await served.ask("POST", **large)).status_code == 413
    async with serving(tmp_path / "grpc", GRPC_HANDLER, package="small", max_message_size=2048) as served:
        assert await served.say("small", "few") == "few!"
        with pytest.raises(grpc.RpcError) as refused:
            await served.say("small", "x" * 4000)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with serving(tmp_path / "default") as served:
        size = 65 * 2**20
        large["content"] = b'"' + b"x" * size + b'"'
        assert (await served.ask("POST", **large)).json() == size


async def test_browsers_of_allowed_origins_may_call(tmp_path: Path) -> None:
    """With the answers that they ask for first; others are told nothing, though a project lets all in by itself."""
    async with serving(tmp_path / "project", allowed_origins="http://a, http://b") as served:
        asked = {"origin": "http://b", "access-control-request-method": "POST"}
        preflight = await served.ask("OPTIONS", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == "http://b"
        answer = await served.ask(headers={"origin": "http://a"})
        assert (answer.text, answer.headers["access-control-allow-origin"]) == ("here", "http://a")
        assert "access-control-allow-origin" not in (await served.ask(headers={"origin": "http://c"})).headers
    async with serving(tmp_path / "project") as served:
        assert (await served.ask(headers={"origin": "http://c"})).headers["access-control-allow-origin"] == "*"


async def test_each_call_of_a_project_is_a_line_of_the_request_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of models are, whichever protocol it came by, in a log for those who look for faults."""
    caplog.set_level(logging.DEBUG)
    with capture_logs() as logs:
        async with serving(tmp_path / "http") as served:
            await served.ask()
        async with serving(tmp_path / "grpc", GRPC_HANDLER, package="logged") as served:
            await served.say("logged", "a")
    seen = [(line["kind"], line["interface"], line["code"]) for line in logs if line["event"] == "request"]
    assert seen == [("handler", "REST", "OK"), ("handler", "gRPC", "OK")]


async def test_files_of_a_project_are_looked_at_only_if_asked_for(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """Its folder is the working directory of its code, which may write there."""
    async with serving(tmp_path / "project") as served:
        before = served.handler
        written(tmp_path / "project", "handler.py", HTTP_HANDLER.replace("here", "there"))
        mock_clock.jump(60)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert (await served.ask()).text == "here"
        assert served.handler is before


@pytest.mark.parametrize("debug", [False, True])
async def test_callers_are_told_what_was_raised_only_if_asked_for(tmp_path: Path, debug: bool) -> None:
    """By ``debug``."""
    code = "class Handler:\n    def handle_get(self): raise ValueError('a secret')\n"
    async with serving(tmp_path / "project", code, debug=debug) as served:
        answer = await served.ask()
        assert answer.status_code == 500
        assert ("ValueError: a secret" in answer.text) is debug
