"""Services with HTTP paths of their own: below their names, and at the root of the port if that is wished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.api.mounts import ServiceItself, ServiceMounts
from ovmstrio.api.refusals import OvmsRefusals
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.wire.http.router import Router
from tests.service.api.rest.handlers.servers import serving_handler
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.pass_through import PassThrough, load_pass_through
from tests.unit.api.rest.servers import Peer, stack

HANDLER = "class Handler:\n    def handle_post(self, payload):\n        return payload\n"
lanes = pytest.mark.parametrize("fast", [True, False], ids=["fast", "application"])


def _post(path: str, body: bytes, *, fast: bool = True) -> bytes:
    extra = "" if fast else "TE: trailers\r\n"
    kind = "Content-Type: application/json\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\n{extra}{kind}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@lanes
async def test_a_handler_at_the_root_is_below_its_name_too(tmp_path: Path, fast: bool) -> None:
    """And the server's own paths are beside it."""
    async with serving_handler(tmp_path, HANDLER) as served, served.connect() as peer:
        name = served.handler_name
        for path in ("/", f"/{name}", f"/{name}/"):
            assert (await peer.ask(_post(path, b"[1]", fast=fast))).json == [1]
        for path in ("/info", f"/{name}/info"):
            assert (await served.ask("GET", path, fast=fast)).json() == {}
        assert (await served.ask("GET", f"/{name}/info/", fast=fast)).headers["location"] == f"/{name}/info"
        assert (await served.ask("GET", f"/v2/models/{name}", fast=fast)).json()["platform"] == "handler"
        answer = await served.ask("GET", "/v2/models/nobody", fast=fast)
        assert (answer.status_code, list(answer.json())) == (404, ["error"])
        assert (await served.ask("GET", f"/{name}/other", fast=fast)).text == "Not Found"


@lanes
async def test_a_handlers_bodies_have_a_limit(tmp_path: Path, fast: bool) -> None:
    """The refusal is in a handler's form, and in the server's below the server's paths."""
    async with serving_handler(tmp_path, HANDLER, max_body_bytes=1000) as served:
        big = b"1" * 2000
        answer = await served.ask(content=big, fast=fast)
        assert (answer.status_code, answer.headers["content-type"]) == (413, "text/plain; charset=utf-8")
        assert "--max_message_size" in answer.text
        assert answer.headers["access-control-allow-origin"] == "*"
        answer = await served.ask("POST", "/v2/models/x/infer", content=big, fast=fast)
        assert (answer.status_code, list(answer.json())) == (413, ["error"])


@lanes
async def test_ops_are_below_their_name_with_the_services_name_or_without(fast: bool) -> None:
    """Health, metrics and figures as well; unreadable bodies are refused in the gateway's form."""
    executor = EchoExecutor()
    async with serving_pipeline(executor, snapshot=lambda: {"running": 2}) as running:
        for path in ("/uci/go", "/uci/uci/go", "/uci/uci/go/"):
            answer = await _ask(running.rest[0], _post(path, b'{"key":["x"],"value":["1"]}', fast=fast))
            assert (answer.status, answer.json["value"]) == (200, ["1"])
        assert [request.method for request in executor.requests] == ["go"] * 3
        assert {request.clientip for request in executor.requests} == {"127.0.0.1"}
        answer = await _ask(running.rest[0], _post("/uci/go", b"{", fast=fast))
        assert (answer.status, answer.json["code"]) == (400, 3)
        get = "GET {} HTTP/1.1\r\nHost: h\r\n" + ("" if fast else "TE: trailers\r\n") + "\r\n"
        assert (await _ask(running.rest[0], get.format("/uci/health").encode())).json == {"status": "ok"}
        assert (await _ask(running.rest[0], get.format("/uci/trace").encode())).json == {"running": 2}
        assert (await _ask(running.rest[0], get.format("/v1/config").encode())).json["uci"]


async def _ask(address: str, request: bytes) -> Any:
    host, _, port = address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        return await Peer(stream).ask(request)


class _Routed(PassThrough):
    """A service that knows its paths itself."""

    async def answer_http(self, request: HttpRequest) -> HttpAnswer | None:
        """Answer with what was asked."""
        if request.path == "/bad":
            raise InvalidRequest("not so")
        if request.path == "/none":
            return None
        return HttpAnswer(200, (), json.dumps([request.mount, request.method, request.path]).encode())


@pytest.mark.parametrize(
    ("target", "status", "body"),
    [
        ("/echo", 200, ["echo", "PUT", ""]),
        ("/echo/a%20b", 200, ["echo", "PUT", "/a b"]),
        ("/echo/bad", 400, {"error": "not so"}),
        ("/echo/none", 200, ["", "PUT", "/echo/none"]),
        ("/else/where", 200, ["", "PUT", "/else/where"]),
        ("/none", 400, {"error": "Invalid request URL - PUT /none"}),
        ("/ec%68o/x", 200, ["echo", "PUT", "/x"]),
        ("/echo%2Fbad", 200, ["", "PUT", "/echo%2Fbad"]),
        ("/echo/%2fbad", 200, ["echo", "PUT", "/%2Fbad"]),
        ("/%2Fecho/bad", 200, ["", "PUT", "/%2Fecho/bad"]),
        ("http://h/echo/x", 200, ["echo", "PUT", "/x"]),
        ("/elsehttp://h/where", 200, ["", "PUT", "/elsehttp://h/where"]),
        ("/echohttp://h/bad", 200, ["", "PUT", "/echohttp://h/bad"]),
    ],
)
async def test_a_service_may_know_its_paths_itself(tmp_path: Path, target: str, status: int, body: Any) -> None:
    """What it does not have below its name the root is asked for; errors have the server's form."""

    async def load(spec: ModelSpec, version: int, directory: Path) -> PassThrough:
        loaded = await load_pass_through(spec, version, directory)
        loaded.__class__ = _Routed
        return loaded

    async with stack(tmp_path, loader=load) as (plane, _, _):
        mounts = ServiceMounts(plane, {ModelSpec.kind: ServiceItself}, root="echo")
        router = Router([], OvmsRefusals(), mounts)
        route = router.find("PUT", target)
        assert not isinstance(route, HttpAnswer)
        answer = await router.answer(route, HttpRequest("PUT", route.path, mount=route.mount))
    assert (answer.status, json.loads(answer.content)) == (status, body)
