"""What the console's endpoints tell, and to whom."""

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

from ovmstrio.access.authentication import Authentication
from ovmstrio.access.directory import Directory
from ovmstrio.access.gate import Gate
from ovmstrio.api.console.assets import asset_names
from ovmstrio.api.console.guard import CHANGE_HEADER
from ovmstrio.api.console.live import Wishes
from ovmstrio.core.callers import Caller, Scopes
from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.events import CallEvent, Door, WireRequest
from ovmstrio.core.http import HttpAnswer, HttpRequest
from ovmstrio.dataplane.guarded_plane import GuardedPlane
from ovmstrio.observability.log_level import LOG_LEVEL
from ovmstrio.observability.logs import configure_logs
from ovmstrio.observability.recent_past import RecentPast
from ovmstrio.server.rest_front_end import make_router
from ovmstrio.wire.http.answers import Cors
from ovmstrio.wire.http.router import Route
from tests.support.callers import bearer, gate_of
from tests.support.pass_through import load_pass_through
from tests.support.peers import LOCAL, peer_at
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import BODY, Serving, serving_rest, stack

_EVENT: Final = re.compile(rb"event: (\w+)\ndata: (.*)\n\n")
INFER: Final = "/v2/models/echo/infer"


@asynccontextmanager
async def _console(folder: Path, mode: str = "local", **options: Any) -> AsyncIterator[tuple[Serving, RecentPast]]:
    past = RecentPast()
    front_end = {"console": mode, "past": past, **options.pop("front_end", {})}
    async with serving_rest(folder, front_end=front_end, observers=(past.failures,), **options) as server:
        yield server, past


class _Events:
    """Reads server-sent events of one connection, each of which is small enough for one chunk."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._buffer = b""

    async def head(self) -> str:
        """Give the head of the answer."""
        with trio.fail_after(WAIT_SECONDS):
            while b"\r\n\r\n" not in self._buffer:
                await self._more()
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        return head.decode()

    async def next(self, name: str) -> Any:
        """Give the data of the next event of a name."""
        with trio.fail_after(WAIT_SECONDS):
            while True:
                for found in _EVENT.finditer(self._buffer):
                    if found[1] == name.encode():
                        self._buffer = self._buffer[found.end() :]
                        return json.loads(found[2])
                await self._more()

    async def rest(self) -> bytes:
        """Read until the answer ends."""
        with trio.fail_after(WAIT_SECONDS):
            while b"\r\n0\r\n\r\n" not in self._buffer:
                await self._more()
        return self._buffer

    async def _more(self) -> None:
        data = await self._stream.receive_some()
        assert data, "the connection was closed"
        self._buffer += data


@asynccontextmanager
async def _live(server: Serving, query: str = "", caller: str = "") -> AsyncIterator[_Events]:
    key = f"x-api-key: {caller}\r\n" if caller else ""
    async with server.connect() as peer:
        await peer.send(f"GET /console/api/live{query} HTTP/1.1\r\nHost: localhost\r\n{key}\r\n".encode())
        events = _Events(peer.stream)
        head = await events.head()
        assert head.startswith("HTTP/1.1 200")
        assert "content-type: text/event-stream" in head
        yield events


async def test_services_are_listed_with_state_kind_and_versions(tmp_path: Path) -> None:
    """One row a name."""
    async with _console(tmp_path) as (server, _):
        (row,) = (await server.get("/console/api/services")).json()["services"]
    assert (row["name"], row["kind"], row["state"], row["reason"]) == ("echo", "model", "ready", "")
    assert [each["version"] for each in row["versions"]] == ["1", "2"]
    assert {each["state"] for each in row["versions"]} == {"AVAILABLE"}


async def test_a_new_version_that_fails_makes_a_service_degraded_with_its_reason(tmp_path: Path) -> None:
    """What serves goes on, and the list says what is wrong."""

    async def load(spec: Any, version: int, directory: Path) -> Any:
        if version == 2:
            raise ModelFailure("the file is <b>broken</b>")
        return await load_pass_through(spec, version, directory)

    async with _console(tmp_path, loader=load) as (server, _):
        (row,) = (await server.get("/console/api/services")).json()["services"]
    assert row["state"] == "degraded"
    assert "the file is <b>broken</b>" in row["reason"]


async def test_a_service_tells_inputs_and_outputs(tmp_path: Path) -> None:
    """The form of the page is made of them."""
    async with _console(tmp_path) as (server, _):
        document = (await server.get("/console/api/services/echo")).json()
        missing = await server.get("/console/api/services/nothing")
    assert document["inputs"] == [
        {"name": "text", "datatype": "BYTES", "shape": ["-1"]},
        {"name": "x", "datatype": "FP32", "shape": ["1", "10"]},
    ]
    assert document["drawing"] is None
    assert missing.status_code == 404


async def test_the_stream_begins_with_everything_and_goes_on_with_what_changes(tmp_path: Path) -> None:
    """A call is in the figures a second later, at the latest."""
    async with _console(tmp_path) as (server, _), _live(server) as events:
        whole = await events.next("whole")
        assert whole["rows"]["echo"]["state"] == "ready"
        assert whole["services"] == {}
        assert whole["totals"]["ready"] is True
        await server.post(INFER, content=BODY)
        figures: dict[str, Any] = {}
        while "echo" not in figures:
            figures = (await events.next("frame")).get("services", {})
    assert figures["echo"]["requests"] == 1
    assert figures["echo"]["errors"] == 0


async def test_figures_that_are_at_rest_are_told_once_more_and_then_not(tmp_path: Path) -> None:
    """An idle viewer gets the totals alone."""
    async with _console(tmp_path) as (server, _), _live(server) as events:
        await events.next("whole")
        await server.post(INFER, content=BODY)
        rates = []
        for _ in range(4):
            frame = await events.next("frame")
            if "services" in frame:
                rates.append(frame["services"]["echo"]["rate"] > 0)
    assert rates == [True, False]


async def test_a_change_of_a_service_is_in_the_stream(tmp_path: Path) -> None:
    """What is not served any more keeps its row, with its state."""
    async with _console(tmp_path) as (server, _), _live(server) as events:
        await events.next("whole")
        await server.registry.apply([])
        row: Any = None
        while row is None or row["state"] != "unloaded":
            row = (await events.next("frame")).get("rows", {}).get("echo")
    assert {each["state"] for each in row["versions"]} == {"END"}


async def test_failed_requests_are_told_without_what_was_sent(tmp_path: Path) -> None:
    """By whom, where and why, and nothing of the body."""
    secret = BODY.replace(b"0.5,-1", b'0.123456,"x"')
    async with _console(tmp_path) as (server, _):
        await server.post(INFER, content=BODY)
        assert (await server.post(INFER, content=secret)).status_code == 400
        answer = await server.get("/console/api/failures")
    (failed,) = answer.json()["failures"]
    assert (failed["name"], failed["code"], failed["method"]) == ("echo", "InvalidRequest", "ModelInfer")
    assert failed["interface"] == "REST"
    assert "0.123456" not in answer.text


async def test_the_log_is_told_from_the_level_that_is_asked_for(tmp_path: Path) -> None:
    """Lines below it are left out; a level that there is not is refused."""
    async with _console(tmp_path) as (server, past):
        log = logging.getLogger("user.code")
        with past.log.listening():
            log.error("wrong: %s", "<script>")
            log.warning("odd")
        async with _live(server, "?log=error") as events:
            (line,) = await events.next("log")
        refused = await server.get("/console/api/live?log=loud")
    assert (line["level"], line["logger"], line["event"]) == ("ERROR", "user.code", "wrong: <script>")
    assert refused.status_code == 400


async def test_the_server_has_its_own_name_unless_it_was_given_another(tmp_path: Path) -> None:
    """The one that clients are told by default is OVMS's."""
    async with _console(tmp_path) as (server, _):
        assert (await server.get("/console/api/server")).json()["name"] == "ovmstrio"
        server.plane.server_name = "cats"
        assert (await server.get("/console/api/server")).json()["name"] == "cats"


async def test_the_stream_ends_when_the_server_begins_to_end(tmp_path: Path) -> None:
    """A drain waits for no viewer."""
    async with _console(tmp_path) as (server, _), _live(server) as events:
        await events.next("whole")
        server.plane.begin_drain()
        assert (await events.next("end"))["reason"] == "the server is shutting down"
        assert b"event: " not in await events.rest()


async def test_texts_that_are_not_utf_8_end_no_stream(tmp_path: Path) -> None:
    """A file's name in a line of the log, and half of a pair of surrogates in the id of a call that failed."""
    body = b'{"id":"\\ud800","inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","data":[NaN,1]}]}'
    async with _console(tmp_path) as (server, past):
        past.log.handle(logging.makeLogRecord({"levelno": logging.ERROR, "msg": "no such file: a\udcff"}))
        assert (await server.post(INFER, content=body)).status_code == 400
        async with _live(server, "?log=error&failures=1") as events:
            (failed,) = await events.next("failures")
            (line,) = await events.next("log")
            assert (await events.next("frame"))["number"] > 1
    assert line["event"] == "no such file: a\udcff"
    assert failed["request_id"] == "\ud800"


def test_what_is_not_wanted_is_not_told() -> None:
    """A 0 says so, as leaving it out does."""
    assert Wishes.read("failures=0&traces=0") == Wishes.read("") == Wishes()
    assert Wishes.read("failures=1&traces=1") == Wishes(failures=True, traces=True)


async def test_there_are_so_many_viewers_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused and told so; when one has left there is room."""
    monkeypatch.setattr("ovmstrio.api.console.live.MOST_VIEWERS", 1)
    async with _console(tmp_path) as (server, _):
        async with _live(server) as events:
            await events.next("whole")
            refused = await server.get("/console/api/live")
            assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
            assert "1 viewers" in refused.json()["error"]
        await server.wait_closed()
        async with _live(server) as events:
            await events.next("whole")


async def test_only_the_head_of_the_stream_is_an_answer_that_ends(tmp_path: Path) -> None:
    """Nobody is told anything then, and the connection goes on."""
    async with _console(tmp_path) as (server, _), server.connect() as peer:
        await peer.send(b"HEAD /console/api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await peer.answer(has_body=False)
        assert (head.status, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        await peer.send(b"GET /console/api/server HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await peer.answer()).json["ready"] is True


async def test_viewers_share_one_frame_a_second(tmp_path: Path) -> None:
    """The numbers that many viewers see are the same."""
    async with _console(tmp_path) as (server, _):
        numbers: list[list[int]] = []

        async def look() -> None:
            async with _live(server) as events:
                await events.next("whole")
                numbers.append([(await events.next("frame"))["number"] for _ in range(2)])

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(look)
    seen = {number for each in numbers for number in each}
    assert all(second > first for first, second in numbers)
    assert len(seen) <= len(numbers)


# Who may look


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"x-forwarded-for": "203.0.113.5"}, "proxy"),
        ({"host": "console.example.org"}, "localhost"),
        ({"origin": "https://example.org"}, "own page"),
        ({"sec-fetch-site": "cross-site"}, "own page"),
        ({"host": "[::1"}, "localhost"),
        ({"x-forwarded-proto": "https"}, "proxy"),
        ({"x-envoy-expected-rq-timeout-ms": "15000"}, "proxy"),
    ],
)
async def test_requests_of_other_pages_and_machines_are_refused(
    tmp_path: Path, headers: dict[str, str], reason: str
) -> None:
    """A proxy, a name that leads here, and pages of other origins."""
    async with _console(tmp_path) as (server, _):
        answer = await server.get("/console/api/services", headers=headers)
    assert answer.status_code == 403
    assert reason in answer.json()["error"]


async def test_answers_are_not_for_other_origins_even_where_the_server_allows_them(tmp_path: Path) -> None:
    """Settings for inference from other pages open no console to them."""
    async with _console(tmp_path, front_end={"cors": Cors("*")}) as (server, _):
        answer = await server.get("/console/api/services", headers={"origin": "https://example.org"})
    assert answer.status_code == 403


async def test_the_console_can_be_off_or_open(tmp_path: Path) -> None:
    """Off there is no such path; on, whoever asks is answered."""
    async with _console(tmp_path / "off", "off") as (server, _):
        assert (await server.get("/console")).status_code == 400
        assert (await server.get("/console/api/services")).status_code == 400
    async with _console(tmp_path / "on", "on") as (server, _):
        headers = {"x-forwarded-for": "203.0.113.5", "host": "models.example.org"}
        assert (await server.get("/console/api/services", headers=headers)).status_code == 200


async def test_known_callers_need_read_to_look_and_admin_to_change(tmp_path: Path) -> None:
    """The page itself has no secrets and asks for the key."""
    gate = gate_of({"reader": "read", "shop": "infer:echo", "boss": "admin"})
    options: dict[str, Any] = {"plane_class": GuardedPlane, "front_end": {"gate": gate}}
    change = {CHANGE_HEADER: "1"}
    async with _console(tmp_path, **options) as (server, _):
        statuses = {
            "page": (await server.get("/console")).status_code,
            "nobody": (await server.get("/console/api/services")).status_code,
            "shop": (await server.get("/console/api/services", headers=bearer("shop"))).status_code,
            "reader": (await server.get("/console/api/services", headers=bearer("reader"))).status_code,
            "reader's change": (
                await server.post("/console/api/reload", headers={**bearer("reader"), **change})
            ).status_code,
        }
        told = (await server.get("/console/api/server", headers=bearer("reader"))).json()
        boss = (await server.get("/console/api/server", headers=bearer("boss"))).json()
    assert statuses == {"page": 200, "nobody": 401, "shop": 403, "reader": 200, "reader's change": 403}
    assert (told["caller"], told["may_change"]) == ("reader", False)
    assert boss["may_change"] is True


async def test_known_callers_need_admin_to_see_what_others_have_sent(tmp_path: Path) -> None:
    """Who may read gets the rest."""
    gate = gate_of({"reader": "read", "boss": "admin infer:*"})
    async with _console(tmp_path, plane_class=GuardedPlane, front_end={"gate": gate}) as (server, past):
        _fail(past)
        told = {}
        for name in ("reader", "boss"):
            answer = await server.get("/console/api/failures", headers=bearer(name))
            async with _live(server, "?failures=1", name) as events:
                (streamed,) = await events.next("failures")
            (asked,) = answer.json()["failures"]
            assert asked == streamed
            told[name] = (asked["body"], asked["body_bytes"])
    assert told == {"reader": ("", 4), "boss": ("mine", 4)}


async def test_a_viewer_that_is_no_administrator_any_more_sees_no_more_of_what_others_have_sent(tmp_path: Path) -> None:
    """The stream goes on with the rest."""
    directory = Directory()
    directory.replace([], {"boss": Caller("boss", "key", Scopes.parse(["admin", "read"]))})
    authentication = Authentication(directory)
    options: dict[str, Any] = {"plane_class": GuardedPlane, "front_end": {"gate": Gate(authentication)}}
    async with _console(tmp_path, **options) as (server, past), _live(server, "?failures=1", "boss") as events:
        _fail(past)
        (before,) = await events.next("failures")
        directory.replace([], {"boss": Caller("boss", "key", Scopes.parse(["read"]))})
        authentication.forget_seen()
        _fail(past)
        (after,) = await events.next("failures")
    assert [(each["body"], each["body_bytes"]) for each in (before, after)] == [("mine", 4), ("", 4)]


async def test_where_nobody_is_known_other_machines_see_nothing_that_others_have_sent(tmp_path: Path) -> None:
    """Though the console is open to them; who may change the server sees it."""
    async with _console(tmp_path, "on") as (server, past):
        _fail(past)
        told = []
        for host in ("models.example.org", "localhost"):
            answer = await server.get("/console/api/failures", headers={"host": host})
            told += [each["body"] for each in answer.json()["failures"]]
    assert told == ["", "mine"]


def _fail(past: RecentPast) -> None:
    door = Door("KServe", "REST")
    past.failures.call_failed(
        CallEvent("echo", "1", "model", door, "ModelInfer", code="InvalidRequest", request=_sent())
    )


def _sent() -> WireRequest:
    request = WireRequest("HTTP", "POST", "/", (), LOCAL)
    request.body = b"mine"
    return request


async def test_the_stream_of_a_caller_that_is_known_no_more_ends_with_the_reason(tmp_path: Path) -> None:
    """Be it that the key is gone or what it may do; the streams of others go on."""
    directory = Directory()
    authentication = Authentication(directory)
    callers = {name: Caller(name, "key", Scopes.parse(["read"])) for name in ("gone", "less", "stays")}
    directory.replace([], callers)
    options: dict[str, Any] = {"plane_class": GuardedPlane, "front_end": {"gate": Gate(authentication)}}
    ends: dict[str, str] = {}

    async def read(events: _Events, name: str) -> None:
        ends[name] = (await events.next("error"))["error"]
        await events.rest()

    async with _console(tmp_path, **options) as (server, _), AsyncExitStack() as open_:
        streams = {name: await open_.enter_async_context(_live(server, caller=name)) for name in callers}
        for events in streams.values():
            await events.next("whole")
        directory.replace([], {"less": Caller("less", "key", Scopes.parse(["metrics"])), "stays": callers["stays"]})
        authentication.forget_seen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, streams["gone"], "gone")
            nursery.start_soon(read, streams["less"], "less")
        assert (await streams["stays"].next("frame"))["totals"]["ready"] is True
        assert (await server.get("/console/api/live", headers=bearer("gone"))).status_code == 401
    assert ends == {
        "gone": "the key is not known, or not any more",
        "less": "'less' may not do that: it needs the scope read",
    }


async def test_a_change_needs_a_header_that_no_form_can_send(tmp_path: Path) -> None:
    """Without it a page of another origin could make a browser ask."""
    reloads: list[int] = []

    async def reload() -> bool:
        await trio.lowlevel.checkpoint()
        reloads.append(1)
        return True

    async with _console(tmp_path, reload=reload) as (server, _):
        bare = await server.post("/console/api/reload")
        crossed = await server.post("/console/api/reload", headers={CHANGE_HEADER: "1", "sec-fetch-site": "same-site"})
        done = await server.post("/console/api/reload", headers={CHANGE_HEADER: "1"})
    assert (bare.status_code, crossed.status_code, done.status_code) == (403, 403, 200)
    assert done.json() == {"changed": True}
    assert reloads == [1]


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
async def test_the_page_offers_what_it_may_change_and_nothing_else(
    tmp_path: Path, client: str, host: str, *, allows_remote: bool, may: bool
) -> None:
    """Where nobody has to be known; what is told is what a change is answered then."""
    async with stack(tmp_path) as (plane, _, _):
        router = make_router(plane, allows_remote_admin=allows_remote, console="on", past=RecentPast())

        async def ask(method: str, path: str, *headers: tuple[str, str]) -> HttpAnswer:
            route = router.find(method, path)
            assert isinstance(route, Route)
            asked = HttpRequest(method, path, headers=(("host", host), *headers), peer=peer_at(client))
            return await router.answer(route, asked)

        told = json.loads((await ask("GET", "/console/api/server")).content)
        changed = await ask("POST", "/console/api/reload", (CHANGE_HEADER, "1"), ("origin", f"http://{host}"))
    assert told["may_change"] is may
    assert (changed.status == 403) is not may


@pytest.fixture
def log(tmp_path: Path) -> Iterator[None]:
    """Have the log be the server's."""
    configure_logs(level="INFO", fmt="json", path=tmp_path / "server.log")
    yield
    LOG_LEVEL.set_parts({})


@pytest.mark.usefixtures("log")
async def test_the_log_and_parts_of_it_have_their_levels_changed(tmp_path: Path) -> None:
    """Each by itself or both at once; what cannot be leaves both as they were."""

    async def change(**asked: Any) -> Any:
        answer = await server.post("/console/api/log_level", json=asked, headers={CHANGE_HEADER: "1"})
        return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"])

    async with _console(tmp_path) as (server, _):
        assert await change(level="warning") == {"level": "WARNING", "log_levels": ""}
        assert await change(log_levels="ovmstrio.graphs=debug") == {
            "level": "WARNING",
            "log_levels": "ovmstrio.graphs=debug",
        }
        refusals = [
            await change(level="error", log_levels="ovmstrio.graphs=loud"),
            await change(level="loud", log_levels=""),
            await change(level=["error"]),
            await change(log_levels=None),
            await change(levels="error"),
            await change(),
        ]
        told = (await server.get("/console/api/server")).json()
        assert (told["log_level"], told["log_levels"]) == ("WARNING", "ovmstrio.graphs=debug")
        assert await change(level="INFO", log_levels="") == {"level": "INFO", "log_levels": ""}
    assert [status for status, _ in refusals] == [400] * len(refusals)
    assert "ovmstrio.graphs: expected one of" in refusals[0][1]
    assert "expected level, log_levels or both, got ['levels']" in refusals[4][1]


# The page


async def test_the_page_allows_nothing_that_is_not_its_own(tmp_path: Path) -> None:
    """No inline code, no other hosts, no frames."""
    async with _console(tmp_path) as (server, _):
        answer = await server.get("/console")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in answer.text
    assert "style=" not in answer.text


async def test_every_file_of_the_page_is_served_compressed_and_known_again(tmp_path: Path) -> None:
    """All of them together are below 400 kB."""
    size = 0
    async with _console(tmp_path) as (server, _):
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


def test_no_file_of_the_page_writes_markup_or_asks_other_hosts() -> None:
    """Texts of others become text, by the only function that makes elements."""
    for name in asset_names():
        text = files("ovmstrio.api.console").joinpath("page", name).read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert forbidden not in text, (name, forbidden)
        hosts = text.replace("http://www.w3.org/", "")
        assert "https://" not in hosts, name
        assert "http://" not in hosts, name
