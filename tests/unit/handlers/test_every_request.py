from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from trio.testing import MockClock

from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.errors import TooManyRequests
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.core.limits import LocalLimit
from ovmstrio.handlers.handler_loading import open_handler
from ovmstrio.handlers.handler_service import HandlerService
from ovmstrio.handlers.routes import HandlerRoutes, error_response_with_cors
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.interfaces import HANDLERS_HTTP
from tests.support.examples import examples
from tests.support.projects import make_project
from tests.support.stub_registry import open_plane_of

Kind = Literal["good", "bad", "absent", "malformed", "poison", "refusal", "short"]
JSON: Final = (("content-type", "application/json"),)
FAILING: Final = {"poison", "refusal", "short"}
CODE: Final = """
import trio
from ovmstrio.ext.handlers import HTTPError

RESULTS = {"bad": lambda n: ValueError(str(n)), "absent": lambda n: HTTPError(404, str(n))}

class Handler:
    def __init__(self, config):
        self.seconds = config["seconds"]
        self.batches, self.callbacks = [], []
        self.running = self.most_running = 0

    async def handle_post(self, payload, query_params):
        self.batches.append([each["number"] for each in payload])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await trio.sleep(self.seconds)
        finally:
            self.running -= 1
        kinds = [each["kind"] for each in payload]
        if "poison" in kinds:
            raise RuntimeError("poisoned")
        if "refusal" in kinds:
            raise HTTPError(409, "refused")
        results = [self.result(each, query["n"]) for each, query in zip(payload, query_params, strict=True)]
        return results[1:] if "short" in kinds else results

    def result(self, item, query):
        number, kind = item["number"], item["kind"]
        if kind in RESULTS:
            return RESULTS[kind](number)
        async def after():
            self.callbacks.append(number)
        return {"number": number, "query": query}, after
"""


@dataclass(frozen=True)
class Client:
    number: int
    sent_at: float
    kind: Kind
    leaves_at: float

    @property
    def body(self) -> bytes:
        text = json.dumps({"number": self.number, "kind": self.kind})
        return (text[:-1] if self.kind == "malformed" else text).encode()


@dataclass
class World:
    clients: list[Client]
    keys: dict[str, Any]
    outcomes: dict[int, HttpAnswer | None] = field(default_factory=dict)
    called: Counter[int] = field(default_factory=Counter)
    instance: Any = None

    async def live(self, folder: Path) -> None:
        project = make_project(folder, CODE, **self.keys)
        limit = LocalLimit(project.max_concurrency)
        with capture_logs():
            async with open_handler(project) as handler:
                self.instance = handler.instance
                models: Any = None
                servable = HandlerService(project.name, handler, limit, None, models)
                servable.gone()
                spec = HandlerSpec(name=project.name, base_path=project.directory, path=project.file)
                async with open_plane_of(spec, servable, lambda: "") as plane:
                    with trio.fail_after(1000):
                        routes = HandlerRoutes(handler)
                        async with trio.open_nursery() as nursery:
                            for client in self.clients:
                                nursery.start_soon(self._send, plane, routes, client)
                    assert limit.in_flight == 0
        self.called.update(number for batch in self.instance.batches for number in batch)

    async def _send(self, plane: DataPlane, routes: HandlerRoutes, client: Client) -> None:
        await trio.sleep_until(client.sent_at)
        answer: HttpAnswer | None = None
        with trio.move_on_at(client.leaves_at):
            request = HttpRequest("POST", "/", f"n={client.number}", JSON, client.body)
            (name,) = plane.registry.statuses()
            try:
                with await plane.call(name, HANDLERS_HTTP, "POST"):
                    answer = await routes.answer_http(request)
            except TooManyRequests as error:
                answer = error_response_with_cors(error)
            assert answer is not None
            for callback in answer.after:
                callback()
        assert client.number not in self.outcomes
        self.outcomes[client.number] = answer

    def check(self) -> None:
        batching = self.keys["server_side_batching"]
        assert sorted(self.outcomes) == [client.number for client in self.clients]
        assert all(1 <= len(batch) <= batching["max_batch_size"] for batch in self.instance.batches)
        assert self.instance.most_running <= self.keys["threads_per_process"]
        assert max(self.called.values(), default=0) <= (2 if batching["retry_singly"] else 1)
        for client in self.clients:
            self._check_outcome(client, self.outcomes[client.number])
        answered = [number for number, answer in sorted(self.outcomes.items()) if answer and answer.status == 200]
        assert sorted(self.instance.callbacks) == answered

    def _check_outcome(self, client: Client, answer: HttpAnswer | None) -> None:
        if answer is None:
            assert client.leaves_at < math.inf
        elif answer.status in {400, 503}:
            assert not self.called[client.number]
            assert client.kind == "malformed" if answer.status == 400 else self.keys["max_concurrency"]
        elif answer.body in {b"internal server error", b"refused"}:
            self._check_failed_batch(client, answer)
        elif answer.status == 200:
            assert (client.kind, json.loads(answer.content)) == (
                "good",
                {"number": client.number, "query": str(client.number)},
            )
        else:
            assert (answer.status, client.kind) in {(500, "bad"), (404, "absent")}
            assert answer.body == str(client.number).encode()

    def _check_failed_batch(self, client: Client, answer: HttpAnswer) -> None:
        kinds = {each.number: each.kind for each in self.clients}
        last = [batch for batch in self.instance.batches if client.number in batch][-1]
        failing = {kinds[number] for number in last} & FAILING
        assert answer.status == 409 if answer.body == b"refused" else answer.status == 500
        assert failing
        if self.keys["server_side_batching"]["retry_singly"]:
            assert failing == {client.kind}


KINDS: Final[list[Kind]] = [*["good"] * 8, "bad", "absent", "malformed", "poison", "refusal", "short"]  # type: ignore[list-item]
TIMES: Final = st.integers(0, 12).map(lambda quarter: quarter / 4)
ENDS: Final = st.one_of(st.just(math.inf), st.integers(0, 20).map(lambda quarter: quarter / 4 + 0.125))


@st.composite
def client_lists(draw: st.DrawFn) -> list[Client]:
    kinds = st.sampled_from(KINDS)
    return [Client(number, draw(TIMES), draw(kinds), draw(ENDS)) for number in range(draw(st.integers(1, 20)))]


@pytest.mark.parametrize("retry_singly", [False, True])
@settings(max_examples=examples(40), deadline=None)
@given(
    clients=client_lists(),
    batching=st.fixed_dictionaries(
        {"max_batch_size": st.integers(1, 6), "batch_interval_seconds": st.sampled_from([0.25, 1, 2.5])}
    ),
    seconds=st.sampled_from([0.0, 0.4, 1.0]),
    threads=st.integers(1, 3),
    max_concurrency=st.sampled_from([0, 0, 3]),
)
def test_every_request_gets_its_own_answer_once(
    clients: list[Client],
    batching: dict[str, Any],
    seconds: float,
    threads: int,
    max_concurrency: int,
    retry_singly: bool,
) -> None:
    batching |= {"retry_singly": retry_singly}
    keys = {"server_side_batching": batching, "threads_per_process": threads, "max_concurrency": max_concurrency}
    world = World(clients, keys | {"config": {"seconds": seconds}})
    with tempfile.TemporaryDirectory() as folder:
        trio.run(world.live, Path(folder), clock=MockClock(autojump_threshold=0))
    world.check()
