from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from ovmstrio.auth.authentication import Authentication, CallerDirectory
from ovmstrio.auth.gate import Gate
from ovmstrio.console.routes import CHANGE_HEADER, asset_names
from ovmstrio.console.stream import StreamFilter
from ovmstrio.core.callers import Caller, Scopes
from ovmstrio.core.events import ApiInterface, CallEvent, WireRequest
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.serving.authorization import AuthorizingDataPlane
from ovmstrio.telemetry.log_levels import LOG_LEVEL
from ovmstrio.telemetry.logs import configure_logs
from ovmstrio.telemetry.recent_history import RecentHistory
from ovmstrio.transport.http.responses import Cors
from ovmstrio.transport.http.router import Route
from tests.support.callers import LOCAL, bearer, gate_of, peer_at
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import BODY, Serving, load_version_1, serving_rest, stack

INFER: Final = "/v2/models/echo/infer"
SERVICES, LIVE, FAILURES = (f"/console/api/{name}" for name in ("services", "live", "failures"))
CHANGE = {CHANGE_HEADER: "1"}


@asynccontextmanager
async def _console(
    folder: Path, mode: str = "local", *, history: RecentHistory | None = None, **options: Any
) -> AsyncIterator[Serving]:
    history = history or RecentHistory()
    front_end = {"console": mode, "history": history, **options.pop("front_end", {})}
    async with serving_rest(folder, front_end=front_end, observers=(history.failures,), **options) as server:
        yield server


@pytest.fixture
def history() -> RecentHistory:
    return RecentHistory()


@pytest.fixture
async def server(tmp_path: Path, history: RecentHistory) -> AsyncIterator[Serving]:
    async with _console(tmp_path, history=history) as serving:
        yield serving


class _Events:
    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._received = b""

    async def until(self, pattern: bytes) -> re.Match[bytes]:
        with trio.fail_after(WAIT_SECONDS):
            while (found := re.search(pattern, self._received, re.DOTALL)) is None:
                data = await self._stream.receive_some()
                assert data, "the connection was closed"
                self._received += data
        self._received = self._received[found.end() :]
        return found

    async def next(self, name: str) -> Any:
        return json.loads((await self.until(rb"event: %b\ndata: (.*?)\n\n" % name.encode()))[1])


@asynccontextmanager
async def _live(server: Serving, query: str = "", caller: str = "") -> AsyncIterator[_Events]:
    key = f"x-api-key: {caller}\r\n" if caller else ""
    async with server.connect() as peer:
        await peer.send(f"GET {LIVE}{query} HTTP/1.1\r\nHost: localhost\r\n{key}\r\n".encode())
        events = _Events(peer.stream)
        await events.until(rb"^HTTP/1.1 200.*content-type: text/event-stream.*?\r\n\r\n")
        yield events


async def _rows(server: Serving) -> Any:
    return (await server.get(SERVICES)).json()["services"]


# Services


async def test_services_are_listed_with_state_kind_and_versions(server: Serving) -> None:
    (row,) = await _rows(server)
    assert (row["name"], row["kind"], row["state"], row["reason"]) == ("echo", "model", "ready", "")
    assert [(each["version"], each["state"]) for each in row["versions"]] == [("1", "AVAILABLE"), ("2", "AVAILABLE")]


async def test_a_service_with_a_failed_version_is_degraded_with_the_reason(tmp_path: Path) -> None:
    async with _console(tmp_path, loader=load_version_1) as server:
        (row,) = await _rows(server)
    assert row["state"] == "degraded"
    assert "the file is <b>broken</b>" in row["reason"]


async def test_a_service_has_inputs_and_outputs(server: Serving) -> None:
    document = (await server.get(f"{SERVICES}/echo")).json()
    assert document["inputs"] == [
        {"name": "text", "datatype": "BYTES", "shape": ["-1"]},
        {"name": "x", "datatype": "FP32", "shape": ["1", "10"]},
    ]
    assert document["drawing"] is None
    assert (await server.get(f"{SERVICES}/nothing")).status_code == 404


async def test_the_server_has_its_configured_name(server: Serving) -> None:
    assert (await server.get("/console/api/server")).json()["name"] == "ovmstrio"
    server.plane.server_name = "cats"
    assert (await server.get("/console/api/server")).json()["name"] == "cats"


async def test_failed_requests_are_listed_without_their_bodies(server: Serving) -> None:
    await server.post(INFER, content=BODY)
    assert (await server.post(INFER, content=BODY.replace(b"0.5,-1", b'0.123456,"x"'))).status_code == 400
    answer = await server.get(FAILURES)
    (failed,) = answer.json()["failures"]
    expected = {"name": "echo", "code": "InvalidRequest", "method": "ModelInfer", "interface": "REST"}
    assert failed.items() >= expected.items()
    assert "0.123456" not in answer.text


# The live stream


async def test_the_stream_begins_with_all_services_and_continues_with_changes(server: Serving) -> None:
    async with _live(server) as events:
        first = await events.next("whole")
        assert first["rows"]["echo"]["state"] == "ready"
        assert first["services"] == {}
        assert first["totals"]["ready"] is True
        await server.post(INFER, content=BODY)
        figures: dict[str, Any] = {}
        while "echo" not in figures:
            figures = (await events.next("frame")).get("services", {})
    assert (figures["echo"]["requests"], figures["echo"]["errors"]) == (1, 0)


async def test_figures_of_an_idle_service_are_sent_once_more_and_then_omitted(server: Serving) -> None:
    async with _live(server) as events:
        await events.next("whole")
        await server.post(INFER, content=BODY)
        rates = []
        for _ in range(4):
            frame = await events.next("frame")
            if "services" in frame:
                rates.append(frame["services"]["echo"]["rate"] > 0)
    assert rates == [True, False]


async def test_an_unloaded_service_keeps_its_row_in_the_stream(server: Serving) -> None:
    async with _live(server) as events:
        await events.next("whole")
        await server.registry.apply([])
        row: Any = None
        while row is None or row["state"] != "unloaded":
            row = (await events.next("frame")).get("rows", {}).get("echo")
    assert {each["state"] for each in row["versions"]} == {"END"}


async def test_the_log_is_sent_from_the_requested_level(server: Serving, history: RecentHistory) -> None:
    log = logging.getLogger("user.code")
    with history.log.listening():
        log.error("wrong: %s", "<script>")
        log.warning("odd")
    async with _live(server, "?log=error") as events:
        (line,) = await events.next("log")
    refused = await server.get(f"{LIVE}?log=loud")
    assert (line["level"], line["logger"], line["event"]) == ("ERROR", "user.code", "wrong: <script>")
    assert refused.status_code == 400


async def test_the_stream_ends_when_a_drain_begins(server: Serving) -> None:
    async with _live(server) as events:
        await events.next("whole")
        server.plane.begin_drain()
        assert (await events.next("end"))["reason"] == "the server is shutting down"
        assert b"event: " not in (await events.until(rb".*\r\n0\r\n\r\n"))[0]


async def test_texts_that_are_not_utf_8_do_not_end_the_stream(server: Serving, history: RecentHistory) -> None:
    body = b'{"id":"\\ud800","inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","data":[NaN,1]}]}'
    history.log.handle(logging.makeLogRecord({"levelno": logging.ERROR, "msg": "no such file: a\udcff"}))
    assert (await server.post(INFER, content=body)).status_code == 400
    async with _live(server, "?log=error&failures=1") as events:
        (failed,) = await events.next("failures")
        (line,) = await events.next("log")
        assert (await events.next("frame"))["number"] > 1
    assert line["event"] == "no such file: a\udcff"
    assert failed["request_id"] == "\ud800"


def test_failures_and_traces_are_sent_on_request_only() -> None:
    assert StreamFilter.read("failures=0&traces=0") == StreamFilter.read("") == StreamFilter()
    assert StreamFilter.read("failures=1&traces=1") == StreamFilter(failures=True, traces=True)


async def test_the_number_of_viewers_is_limited(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ovmstrio.console.stream.MAX_VIEWERS", 1)
    async with _live(server) as events:
        await events.next("whole")
        refused = await server.get(LIVE)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert "1 viewers" in refused.json()["error"]
    await server.wait_closed()
    async with _live(server) as events:
        await events.next("whole")


async def test_head_of_the_stream_is_answered_on_a_kept_connection(server: Serving) -> None:
    async with server.connect() as peer:
        await peer.send(b"HEAD /console/api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await peer.answer(has_body=False)
        assert (head.status, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        await peer.send(b"GET /console/api/server HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await peer.answer()).json["ready"] is True


# Access


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"x-forwarded-for": "203.0.113.5"}, "proxy"),
        ({"x-forwarded-proto": "https"}, "proxy"),
        ({"x-envoy-expected-rq-timeout-ms": "15000"}, "proxy"),
        ({"host": "console.example.org"}, "localhost"),
        ({"host": "[::1"}, "localhost"),
        ({"origin": "https://example.org"}, "cross-origin request"),
        ({"sec-fetch-site": "cross-site"}, "cross-site request"),
    ],
)
async def test_proxies_other_names_and_origins_are_refused(
    tmp_path: Path, headers: dict[str, str], reason: str
) -> None:
    # Inference from other origins may be allowed; the console is not.
    async with _console(tmp_path, front_end={"cors": Cors("*")}) as server:
        answer = await server.get(SERVICES, headers=headers)
    assert answer.status_code == 403
    assert reason in answer.json()["error"]


@pytest.mark.parametrize(
    ("mode", "path", "status"), [("off", "/console", 400), ("off", SERVICES, 400), ("on", SERVICES, 200)]
)
async def test_the_console_may_be_off_or_open(tmp_path: Path, mode: str, path: str, status: int) -> None:
    async with _console(tmp_path, mode) as server:
        headers = {"x-forwarded-for": "203.0.113.5", "host": "models.example.org"}
        assert (await server.get(path, headers=headers)).status_code == status


def _guarded(gate: Any) -> dict[str, Any]:
    return {"plane_class": AuthorizingDataPlane, "front_end": {"gate": gate}}


@pytest.mark.parametrize(
    ("caller", "status", "may_change", "change_status"),
    [("", 401, None, 401), ("shop", 403, None, 403), ("reader", 200, False, 403), ("admin", 200, True, 501)],
)
async def test_known_callers_need_read_to_look_and_admin_to_change(
    tmp_path: Path, caller: str, status: int, may_change: bool | None, change_status: int
) -> None:
    gate = gate_of({"reader": "read", "shop": "infer:echo", "admin": "admin"})
    headers = bearer(caller) if caller else {}
    async with _console(tmp_path, **_guarded(gate)) as server:
        # The page itself has no secrets.
        assert (await server.get("/console")).status_code == 200
        assert (await server.get(SERVICES, headers=headers)).status_code == status
        document = (await server.get("/console/api/server", headers=headers)).json()
        changed = await server.post("/console/api/reload", headers={**headers, **CHANGE})
    assert changed.status_code == change_status
    assert (document.get("caller"), document.get("may_change")) == (caller if status == 200 else None, may_change)


def _fail(history: RecentHistory) -> None:
    request = WireRequest("HTTP", "POST", "/", (), LOCAL)
    request.body = b"mine"
    event = CallEvent(
        "echo", "1", "model", ApiInterface("KServe", "REST"), "ModelInfer", code="InvalidRequest", request=request
    )
    history.failures.call_failed(event)


@pytest.mark.parametrize(("caller", "body"), [("reader", ""), ("admin", "mine")])
async def test_known_callers_need_admin_to_see_bodies(
    tmp_path: Path, history: RecentHistory, caller: str, body: str
) -> None:
    gate = gate_of({"reader": "read", "admin": "admin infer:*"})
    async with _console(tmp_path, history=history, **_guarded(gate)) as server:
        _fail(history)
        listed = (await server.get(FAILURES, headers=bearer(caller))).json()["failures"]
        async with _live(server, "?failures=1", caller) as events:
            streamed = await events.next("failures")
    assert listed == streamed
    assert [(each["body"], each["body_bytes"]) for each in listed] == [(body, 4)]


async def test_a_viewer_that_is_no_administrator_any_more_sees_no_more_bodies(
    tmp_path: Path, history: RecentHistory
) -> None:
    directory = CallerDirectory()
    authentication = Authentication(directory)

    def set_scopes(*scopes: str) -> None:
        directory.replace([], {"admin": Caller("admin", "key", Scopes.parse(scopes))})
        authentication.clear_cache()

    set_scopes("admin", "read")
    async with (
        _console(tmp_path, history=history, **_guarded(Gate(authentication))) as server,
        _live(server, "?failures=1", "admin") as events,
    ):
        _fail(history)
        (before,) = await events.next("failures")
        set_scopes("read")
        _fail(history)
        (after,) = await events.next("failures")
    assert [(each["body"], each["body_bytes"]) for each in (before, after)] == [("mine", 4), ("", 4)]


@pytest.mark.parametrize(("host", "body"), [("models.example.org", ""), ("localhost", "mine")])
async def test_unknown_callers_see_bodies_locally_only(
    tmp_path: Path, history: RecentHistory, host: str, body: str
) -> None:
    async with _console(tmp_path, "on", history=history) as server:
        _fail(history)
        answer = await server.get(FAILURES, headers={"host": host})
    assert [each["body"] for each in answer.json()["failures"]] == [body]


async def test_the_stream_of_a_revoked_caller_ends_with_the_reason(tmp_path: Path) -> None:
    directory = CallerDirectory()
    authentication = Authentication(directory)
    callers = {name: Caller(name, "key", Scopes.parse(["read"])) for name in ("revoked", "limited", "stays")}
    directory.replace([], callers)
    ends: dict[str, str] = {}

    async def read(events: _Events, name: str) -> None:
        ends[name] = (await events.next("error"))["error"]
        await events.until(rb"\r\n0\r\n\r\n")

    async with _console(tmp_path, **_guarded(Gate(authentication))) as server, AsyncExitStack() as stack_:
        streams = {name: await stack_.enter_async_context(_live(server, caller=name)) for name in callers}
        for events in streams.values():
            await events.next("whole")
        directory.replace(
            [], {"limited": Caller("limited", "key", Scopes.parse(["metrics"])), "stays": callers["stays"]}
        )
        authentication.clear_cache()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, streams["revoked"], "revoked")
            nursery.start_soon(read, streams["limited"], "limited")
        assert (await streams["stays"].next("frame"))["totals"]["ready"] is True
        assert (await server.get(LIVE, headers=bearer("revoked"))).status_code == 401
    assert ends == {
        "revoked": "unknown or expired key",
        "limited": "'limited' lacks the scope read",
    }


@pytest.mark.parametrize(
    ("headers", "status", "reloads"),
    [({}, 403, 0), ({**CHANGE, "sec-fetch-site": "same-site"}, 403, 0), (CHANGE, 200, 1)],
)
async def test_a_change_needs_its_own_header(
    tmp_path: Path, headers: dict[str, str], status: int, reloads: int
) -> None:
    counted: list[int] = []

    async def reload() -> bool:
        await trio.lowlevel.checkpoint()
        counted.append(1)
        return True

    async with _console(tmp_path, reload=reload) as server:
        answer = await server.post("/console/api/reload", headers=headers)
    assert (answer.status_code, len(counted)) == (status, reloads)
    assert status == 403 or answer.json() == {"changed": True}


@pytest.mark.parametrize(
    ("client", "host", "allows_remote", "may"),
    [
        ("127.0.0.1", "localhost:8000", False, True),
        ("", "localhost", False, True),
        ("192.0.2.7", "192.0.2.1:8000", False, False),
        ("192.0.2.7", "models.example.org", True, True),
        ("127.0.0.1", "models.example.org", False, False),
    ],
)
async def test_may_change_is_accurate(
    tmp_path: Path, client: str, host: str, *, allows_remote: bool, may: bool
) -> None:
    async with stack(tmp_path) as (plane, _, _):
        router = make_rest_router(plane, allows_remote_admin=allows_remote, console="on", history=RecentHistory())

        async def send(method: str, path: str, *headers: tuple[str, str]) -> HttpAnswer:
            route = router.find(method, path)
            assert isinstance(route, Route)
            request = HttpRequest(method, path, headers=(("host", host), *headers), peer=peer_at(client))
            return await router.answer(route, request)

        document = json.loads((await send("GET", "/console/api/server")).content)
        changed = await send("POST", "/console/api/reload", (CHANGE_HEADER, "1"), ("origin", f"http://{host}"))
    assert document["may_change"] is may
    assert (changed.status == 403) is not may


@pytest.fixture
def log(tmp_path: Path) -> Iterator[None]:
    configure_logs(level="INFO", fmt="json", path=tmp_path / "server.log")
    yield
    LOG_LEVEL.set_logger_levels({})


async def _change(server: Serving, **levels: Any) -> Any:
    answer = await server.post("/console/api/log_level", json=levels, headers=CHANGE)
    return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"])


@pytest.mark.usefixtures("log")
async def test_levels_of_the_log_and_its_parts_are_changed(server: Serving) -> None:
    parts = "ovmstrio.graphs=debug"
    assert await _change(server, level="warning") == {"level": "WARNING", "log_levels": ""}
    assert await _change(server, log_levels=parts) == {"level": "WARNING", "log_levels": parts}
    document = (await server.get("/console/api/server")).json()
    assert (document["log_level"], document["log_levels"]) == ("WARNING", parts)
    assert await _change(server, level="INFO", log_levels="") == {"level": "INFO", "log_levels": ""}


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    ("levels", "message"),
    [
        *(({"level": each, "log_levels": ""}, "expected") for each in ("loud", ["error"])),
        *(({"level": "error", "log_levels": each}, "expected") for each in (None, "ovmstrio.graphs=loud")),
        *((each, "expected level, log_levels or both") for each in ({"levels": "error"}, {})),
    ],
)
async def test_malformed_log_levels_change_nothing(server: Serving, levels: dict[str, Any], message: str) -> None:
    status, error = await _change(server, **levels)
    assert (status, message in error) == (400, True), error
    document = (await server.get("/console/api/server")).json()
    assert (document["log_level"], document["log_levels"]) == ("INFO", "")


# The page


async def test_the_page_allows_no_inline_code_and_no_other_hosts(server: Serving) -> None:
    answer = await server.get("/console")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in answer.text
    assert "style=" not in answer.text


async def test_files_of_the_page_are_compressed_cached_and_below_400_kb_together(server: Serving) -> None:
    size = 0
    for name in sorted(asset_names()):
        path = f"/console/page/{name}"
        answer = await server.get(path, headers={"accept-encoding": "gzip"})
        assert answer.status_code == 200, name
        size += len(gzip.compress(answer.content))
        again = await server.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert (await server.get("/console/page/nothing.js")).status_code == 404
    assert (await server.get("/console/page/..%2froutes.py")).status_code == 400
    assert size < 400_000


def test_files_of_the_page_write_no_markup_and_call_no_other_hosts() -> None:
    for name in asset_names():
        text = files("ovmstrio.console").joinpath("page", name).read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert forbidden not in text, (name, forbidden)
        hosts = text.replace("http://www.w3.org/", "")
        assert "https://" not in hosts, name
        assert "http://" not in hosts, name
