from __future__ import annotations

import gzip
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from ovmstrio.encoding import json_reader
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES
from ovmstrio.server import front_ends as rest_front_end
from ovmstrio.transport.http.router import Router
from ovmstrio.util import slices
from tests.support.all_kinds import write_hostile_services
from tests.support.hostile_bodies import FORMS, HEADERS, ROUTES, SHAPES, bodies
from tests.support.served_in_thread import serving_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.transport.http.router import Rule

PATIENCE_SECONDS = 60
MAX_MESSAGE_CHARACTERS = 8192
NOT_SUPPORTED = 501
"""Status of settings that the server does not have."""
LOAD_FAILURE = b'{"error":"failed to load'
"""Begin of the answer, with the status 500, to a configuration that cannot be loaded."""
SIZES = (60 * 1024, 256 * 1024)
KINDS = ("JSON", "gzip", "large gzip", "large JSON")


@dataclass
class AttackedServer:
    """A server in a thread.

    Attributes:
        port: its REST port.
        rules: the rules of its router.
        parsed_on_loop: sizes of texts above the limit that were parsed in the thread of the event loop.
        pause: runs in the worker thread before each slice.
    """

    port: int
    rules: list[Rule]
    parsed_on_loop: list[int] = field(default_factory=list)
    pause: Any = None

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        with closing(connection):
            connection.request("POST", path, body, headers)
            with connection.getresponse() as answer:
                return answer.status, answer.read()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    """Serve a service of every kind but text models, and observe where JSON is parsed."""
    rules: list[Rule] = []

    class RecordedRouter(Router):
        def __init__(self, given: Any, *arguments: Any, **options: Any) -> None:
            rules[:] = given
            super().__init__(given, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rest_front_end, "Router", RecordedRouter)
        settings: dict[str, Any] = {"model_control": "explicit", "allow_shared_memory": True, "load_model": "*"}
        config = write_hostile_services(tmp_path_factory.mktemp("attacked"))
        with serving_in_thread(config_path=config, **settings) as server:
            made = AttackedServer(int(server.http.rpartition(":")[2]), rules)
            loops = {thread.ident for thread in threading.enumerate() if thread.name.endswith("(run)")}
            assert len(loops) == 1

            def observed(loads: Any) -> Any:
                def parse(text: Any, *arguments: Any, **options: Any) -> Any:
                    if threading.get_ident() in loops and len(text) > AT_ONCE_BYTES:
                        made.parsed_on_loop.append(len(text))
                    return loads(text, *arguments, **options)

                return parse

            def paused_counter() -> float:
                if made.pause is not None:
                    made.pause()
                return perf_counter()

            patch.setattr(orjson, "loads", observed(orjson.loads))
            patch.setattr(json, "loads", observed(json.loads))
            patch.setattr(slices, "perf_counter", paused_counter)
            yield made


def test_every_route_that_accepts_a_body_is_tested(attacked: AttackedServer) -> None:
    tested = {
        next((rule.pattern for rule in attacked.rules if rule.match(path)), path)
        for route in ROUTES.values()
        for path in route.paths
    }
    routes = {rule.pattern for rule in attacked.rules if rule.methods & {"POST", "PUT", "PATCH"}}
    assert len(routes) > 50
    assert routes <= tested


@pytest.mark.parametrize("name", ROUTES)
def test_the_body_without_hostile_values_is_valid(attacked: AttackedServer, name: str) -> None:
    route = ROUTES[name]
    status, answer = attacked.post(route.paths[0], json.dumps(route.base).encode(), HEADERS)
    # The log can be changed where an earlier test of the same process has configured it.
    assert status == route.status or (status, route.status) == (200, 412), answer


@pytest.mark.parametrize("name", ROUTES)
def test_a_hostile_body_is_served_or_refused_with_a_short_message_off_the_event_loop(
    attacked: AttackedServer, name: str
) -> None:
    route = ROUTES[name]
    wrong: list[str] = []
    attacked.parsed_on_loop.clear()
    # A shape meets every other route, in one of its places and one kind of body; the slow test has all of them.
    shapes = list(SHAPES)[list(ROUTES).index(name) % 2 :: 2]
    for number, shape in enumerate(shapes):
        place, kind = route.places[number % len(route.places)], KINDS[number // len(route.places) % len(KINDS)]
        body = bodies(route, place, shape, SIZES["large" in kind])
        headers = dict(HEADERS)
        if "gzip" in kind:
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        status, answer = attacked.post(route.paths[0], body, headers)
        is_refused = 400 <= status < 500 or status == NOT_SUPPORTED or answer.startswith(LOAD_FAILURE)
        if not is_refused and status != 200:
            wrong.append(f"{shape} at {place!r} as {kind}: {status} {answer[:200]!r}")
        elif is_refused and len(json.loads(answer).get("error", "")) > MAX_MESSAGE_CHARACTERS:
            wrong.append(f"{shape} at {place!r} as {kind}: a message of {len(answer)} bytes")
    assert not wrong
    assert attacked.parsed_on_loop == []


@pytest.mark.parametrize("size", SIZES)
def test_hostile_forms_are_served_or_refused_with_a_short_message(attacked: AttackedServer, size: int) -> None:
    wrong: list[str] = []
    for name, (content_type, make) in FORMS.items():
        status, answer = attacked.post("/handler", make(size), {"Content-Type": content_type})
        if status not in {200, *range(400, 500)} or len(answer) > MAX_MESSAGE_CHARACTERS:
            wrong.append(f"{name}: {status} {answer[:200]!r}")
    assert not wrong


LARGE_JSON = [
    *("infer", "predict", "generate", "chat", "payload", "load", "index", "logging", "handler", "ops", "profile"),
]


@pytest.mark.parametrize("name", LARGE_JSON)
def test_other_requests_are_answered_while_a_hostile_body_is_read(attacked: AttackedServer, name: str) -> None:
    is_reading, may_read = threading.Event(), threading.Event()

    def pause() -> None:
        is_reading.set()
        assert may_read.wait(PATIENCE_SECONDS)

    route, headers = ROUTES[name], HEADERS
    neighbour = ROUTES["infer"]
    attacked.pause = pause
    try:
        with ThreadPoolExecutor(1) as pool:
            body = bodies(route, route.places[-1], "texts", 2**20)
            hostile = pool.submit(attacked.post, route.paths[0], body, headers)
            try:
                assert is_reading.wait(PATIENCE_SECONDS)
                status, _ = attacked.post(neighbour.paths[0], json.dumps(neighbour.base).encode(), headers)
                assert status == 200
                assert not hostile.done()
            finally:
                may_read.set()
            assert hostile.result(PATIENCE_SECONDS)
    finally:
        attacked.pause = None


def test_a_large_text_parsed_on_the_event_loop_is_detected(
    attacked: AttackedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.protocols.kserve.rest_requests.AT_ONCE_BYTES", 2**40)
    monkeypatch.setattr(json_reader, "AT_ONCE_BYTES", 2**40)
    attacked.parsed_on_loop.clear()
    attacked.post("/v2/repository/index", bodies(ROUTES["index"], "x", "zeros", 2**18), {})
    assert len(attacked.parsed_on_loop) == 1
    attacked.parsed_on_loop.clear()
