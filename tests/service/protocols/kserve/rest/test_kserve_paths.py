from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import orjson
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import NotFound, Overloaded
from ovmstrio.protocols.kserve.rest_routes import HEAD_LENGTH
from ovmstrio.server.server import remove_ended_metrics
from ovmstrio.telemetry.metrics import Metrics
from ovmstrio.transport.http.responses import Cors
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import BODY, Peer, Serving, infer_head, infer_post, load_version_1, serving_rest

DATA = [0.5, -1.0]
INFER = "/v2/models/echo/infer"
MODEL_MISSING = "Model with requested name is not found"
VERSION_MISSING = "Model with requested version is not found"
MALFORMED_VERSION = "Model version must be an integer"
INTERNAL = {"error": "internal error; the server's log has the details"}
LANES = pytest.mark.parametrize("extra", [(), ("TE: trailers",)], ids=["fast", "application"])


def _infer_document(version: str = "2") -> dict[str, Any]:
    output = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": DATA}
    return {"model_name": "echo", "model_version": version, "outputs": [output]}


EXTENSIONS = [
    *("binary_tensor_data", "classification", "generate", "logging", "model_configuration", "schedule_policy"),
    "statistics",
]
TENSORS = [
    {"name": "text", "datatype": "BYTES", "shape": [-1]},
    {"name": "x", "datatype": "FP32", "shape": [1, 10]},
]
METADATA = {"name": "echo", "versions": ["1", "2"], "platform": "OpenVINO", "inputs": TENSORS, "outputs": TENSORS}
CONFIG_TENSORS = [
    {"name": "text", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "x", "data_type": "TYPE_FP32", "dims": [1, 10]},
]
INDEX = [{"name": "echo", "version": version, "state": "READY"} for version in ("1", "2")]


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v2", {"name": "OpenVINO Model Server", "version": ANY, "extensions": EXTENSIONS}),
        *((f"/v2/health/{state}", {state: True}) for state in ("live", "ready")),
        *((f"/v2/models/echo{suffix}", METADATA) for suffix in ("", "/", "/versions/1")),
        ("/v2/models", {"models": INDEX}),
        (
            "/v2/models/echo/config",
            {
                "name": "echo",
                "platform": "OpenVINO",
                "backend": "openvino",
                "max_batch_size": 0,
                "input": CONFIG_TENSORS,
                "output": CONFIG_TENSORS,
            },
        ),
    ],
)
async def test_documents_have_the_keys_of_kserve_in_order(
    serving: Serving, path: str, document: dict[str, Any]
) -> None:
    answer = await serving.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert (answer.json(), list(answer.json())) == (document, list(document))
    head = await serving.with_http(lambda client: client.head(path))
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("path", ["/v2/models/echo/ready", "/v2/models/echo/versions/2/ready"])
async def test_a_ready_model_is_answered_with_its_name(serving: Serving, path: str) -> None:
    answer = await serving.get(path)
    assert (answer.status_code, answer.json()) == (200, {"name": "echo", "ready": True})
    head = await serving.with_http(lambda client: client.head(path))
    assert (head.status_code, head.content) == (200, b"")


async def test_a_draining_server_is_live_and_not_ready(serving: Serving) -> None:
    serving.plane.begin_drain()
    assert (await serving.get("/v2/health/live")).status_code == 200
    answer = await serving.get("/v2/health/ready")
    assert (answer.status_code, answer.json()) == (503, {"error": "Server is not ready - the server is shutting down"})


async def test_the_repository_index_lists_all_versions(serving: Serving) -> None:
    for body in (b"", b"{}", b'{"ready": true}'):
        assert (await serving.post("/v2/repository/index", content=body)).json() == INDEX
    refused = await serving.post("/v2/repository/index", content=b"{")
    assert (refused.status_code, refused.json()["error"][:26]) == (412, "The file is not valid json")


async def test_the_repository_index_lists_ready_versions_on_request(tmp_path: Path) -> None:
    async with serving_rest(tmp_path, loader=load_version_1) as server:
        index = (await server.post("/v2/repository/index")).json()
        assert [(entry["version"], entry["state"] == "READY") for entry in index] == [("1", True), ("2", False)]
        assert "the file is <b>broken</b>" in index[1]["reason"]
        ready = (await server.post("/v2/repository/index", content=b'{"ready": true}')).json()
        assert [entry["version"] for entry in ready] == ["1"]
        not_loaded = await server.get("/v2/models/echo/versions/2/ready")
        assert not_loaded.status_code == 404
        assert not_loaded.json()["error"].startswith("Model with requested version is not loaded yet")


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        *((path, 404, MODEL_MISSING) for path in ("nothing", "nothing/ready", "nothing/config", "echo%20echo")),
        *((f"echo/versions/{path}", 404, VERSION_MISSING) for path in ("7", "7/ready", "0/ready", "9" * 20)),
        *((f"echo/versions/{path}", 400, MALFORMED_VERSION) for path in ("one", "-1/ready")),
        ("echo/labels/stable", 400, "Invalid request URL"),
    ],
)
async def test_unknown_names_and_versions_are_refused(serving: Serving, path: str, status: int, text: str) -> None:
    answer = await serving.get(f"/v2/models/{path}")
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert answer.json()["error"].startswith(text)


async def test_names_are_percent_decoded(tmp_path: Path) -> None:
    name = "a model, pr\u00fcf"
    (tmp_path / "other" / "1").mkdir(parents=True)
    async with serving_rest(tmp_path, models=(ModelSpec(name=name, base_path=tmp_path / "other"),)) as server:
        path = "/v2/models/a%20model%2C%20pr%C3%BCf"
        assert (await server.get(path)).json()["name"] == name
        assert (await server.post(f"{path}/infer", content=BODY)).json()["model_name"] == name


@LANES
@pytest.mark.parametrize(
    ("suffix", "version"), [("", "2"), ("/versions/1", "1"), ("/versions/2", "2"), ("/versions/0", "2")]
)
async def test_the_requested_version_answers(
    serving: Serving, suffix: str, version: str, extra: tuple[str, ...]
) -> None:
    async with serving.connect() as peer:
        answer = await peer.ask(infer_post(BODY[:-1] + b',"id":"seven"}', *extra, suffix=suffix))
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json == _infer_document(version) | {"id": "seven"}
    assert list(answer.json) == ["model_name", "id", "model_version", "outputs"]


async def test_binary_data_is_received_and_sent(serving: Serving) -> None:
    raw = b"\0\0\0\x3f\0\0\x80\xbf"
    head = orjson.dumps(
        {
            "parameters": {"binary_data_output": True},
            "inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}],
        }
    )
    async with serving.connect() as peer:
        answer = await peer.ask(infer_post(head + raw, f"{HEAD_LENGTH.upper()}: {len(head)}"))
    assert answer.status == 200
    length = int(answer.headers[HEAD_LENGTH.lower()])
    assert answer.body[length:] == raw
    assert orjson.loads(answer.body[:length])["outputs"] == [
        {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    ]


@LANES
@pytest.mark.parametrize(
    ("suffix", "body", "status", "text"),
    [
        ("", b"{", 412, "The file is not valid json"),
        ("", b"[]", 400, "Request body should be JSON object"),
        ("", b"{}", 400, "No inputs found"),
        ("", BODY[:-1] + b',"parameters":{"fail":"it broke"}}', 500, "it broke"),
        *((f"/versions/{each}", BODY, 404, VERSION_MISSING) for each in ("9" * 20, "9" * 19, "7")),
        *((f"/versions/{each}", BODY, 400, MALFORMED_VERSION) for each in ("one", "-1", "1.0", "%D9%A1")),
        ("/versions/7", b"{}", 400, "No inputs found"),
        ("/versions/one", b"{", 412, "The file is not valid json"),
    ],
)
async def test_a_failed_inference_has_an_error_and_keeps_the_connection(
    serving: Serving, suffix: str, body: bytes, *, status: int, text: str, extra: tuple[str, ...]
) -> None:
    async with serving.connect() as peer:
        answer = await peer.ask(infer_post(body, *extra, suffix=suffix))
        assert (answer.status, list(answer.json)) == (status, ["error"])
        assert answer.json["error"].startswith(text)
        assert answer.headers["content-type"] == "application/json"
        assert (await peer.ask(infer_post())).status == 200


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [*((each, gzip.compress) for each in ("gzip", "x-gzip", "GZIP")), ("deflate", zlib.compress), ("identity", bytes)],
)
async def test_compressed_bodies_are_read(serving: Serving, encoding: str, encode: Any) -> None:
    answer = await serving.post(INFER, content=encode(BODY), headers={"Content-Encoding": encoding})
    assert (answer.status_code, answer.json()) == (200, _infer_document())


@pytest.mark.parametrize(
    ("encoding", "body", "status", "text"),
    [
        ("br", BODY, 400, "Content-Encoding 'br' is not supported; use gzip, deflate or none"),
        ("gzip, gzip", BODY, 400, "Content-Encoding 'gzip, gzip' is not supported"),
        ("gzip", BODY, 400, "the body is not gzip"),
        ("deflate", BODY, 400, "the body is not deflate"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400, "the body is not gzip: unexpected end of data"),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", 400, "gzip body has trailing data"),
        ("gzip", b"", 400, "the body is not gzip: unexpected end of data"),
        (
            "gzip",
            gzip.compress(bytes(2_000_000), mtime=0),
            413,
            "the body has more than 1000000 bytes, the limit is 1000000",
        ),
    ],
)
async def test_malformed_compression_is_refused(
    tmp_path: Path, encoding: str, body: bytes, status: int, text: str
) -> None:
    async with serving_rest(tmp_path, front_end={"max_body_bytes": 1_000_000}) as server:
        answer = await server.post(INFER, content=body, headers={"Content-Encoding": encoding})
    assert answer.status_code == status
    assert answer.json()["error"].startswith(text)


async def test_an_overload_is_answered_with_a_time_to_retry(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.plane, "infer", _raising(Overloaded("the queue is full", retry_after_seconds=2.4)))
    answer = await serving.post(INFER, content=BODY)
    assert (answer.status_code, answer.json()) == (429, {"error": "the queue is full"})
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}])
async def test_malformed_bodies_count_as_failures_of_known_models(tmp_path: Path, headers: dict[str, str]) -> None:
    async with serving_rest(tmp_path, metrics=Metrics()) as server:
        for model in ("echo", "nothing"):
            assert (await server.post(f"/v2/models/{model}/infer", content=b"{", headers=headers)).status_code >= 400
        text = (await server.get("/metrics")).text
    failures = [line for line in text.splitlines() if line.startswith("ovms_requests_fail") and line.endswith(" 1.0")]
    assert len(failures) == 1
    assert 'name="echo"' in failures[0]
    assert 'method="ModelInfer"' in failures[0]
    assert "nothing" not in text


_BLOCK = b'{"parameters":{"block":true},' + BODY[1:]


@asynccontextmanager
async def _limited(folder: Path, most: int, queue: int) -> AsyncIterator[Serving]:
    async with serving_rest(folder, metrics=Metrics()) as serving:
        limits = {"max_concurrency": most, "max_queue": queue}
        await serving.registry.apply([spec.model_copy(update=limits) for spec in serving.specs])
        yield serving


async def _wait_queued(serving: Serving, count: int) -> None:
    with trio.fail_after(WAIT_SECONDS):
        queued = f'ovmstrio_queued_requests{{name="echo"}} {count}.0'.encode()
        while queued not in (serving.plane.render_metrics() or b""):
            await trio.testing.wait_all_tasks_blocked(0.01)


async def test_the_queue_of_a_removed_service_is_not_in_the_metrics(tmp_path: Path) -> None:
    metrics = Metrics()
    async with serving_rest(tmp_path, metrics=metrics) as serving:
        serving.registry.subscribe(partial(remove_ended_metrics, metrics, serving.registry))
        specs = [spec.model_copy(update={"max_concurrency": 1}) for spec in serving.specs]
        for _ in range(2):
            await serving.registry.apply(specs)
            assert (await serving.post("/v2/models/echo/infer", content=BODY)).status_code == 200
            await _wait_queued(serving, 0)
            await serving.registry.apply([])
            assert (await serving.post("/v2/models/echo/infer", content=BODY)).status_code == 404
            with trio.fail_after(WAIT_SECONDS):
                while b'ovmstrio_queued_requests{name="echo"}' in metrics.render():
                    await trio.testing.wait_all_tasks_blocked(0.01)


@pytest.mark.parametrize("extra", [(), ("Accept-Encoding: x", "TE: trailers")], ids=["fast lane", "application"])
async def test_a_call_above_the_queue_is_refused_before_its_body(tmp_path: Path, extra: tuple[str, ...]) -> None:
    async with _limited(tmp_path, 1, 0) as serving, serving.connect() as first, serving.connect() as second:
        await first.send(infer_post(_BLOCK))
        await serving.wait_blocked()
        answer = await second.ask(infer_head(len(BODY), *extra))
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert answer.json == {
            "error": '"echo" has 1 calls under way and 0 waiting, and may have 1 (max_concurrency) and 0 (max_queue);'
            " try again in 1 s"
        }
        # Metadata and health are not limited.
        assert (await serving.get("/v2/models/echo")).status_code == 200
        assert (await serving.get("/v2/health/ready")).status_code == 200
        if not extra:
            await second.send(BODY)
            assert (await second.ask(infer_post(model="none"))).status == 404
            await first.stream.aclose()
            with trio.fail_after(WAIT_SECONDS):
                await serving.servable.cancelled.wait()
            assert (await second.ask(infer_post())).status == 200
        metrics = (serving.plane.render_metrics() or b"").decode()
        assert 'ovmstrio_rejected_requests_total{name="echo",reason="queue_full"} 1.0' in metrics
        labels = 'api="KServe",code="Overloaded",interface="REST",method="ModelInfer",name="echo"'
        assert f"ovmstrio_requests_total{{{labels}" in metrics


@LANES
async def test_a_service_without_limits_refuses_calls_after_its_clients_have_disconnected(
    tmp_path: Path, extra: tuple[str, ...]
) -> None:
    async with serving_rest(tmp_path, metrics=Metrics()) as serving, AsyncExitStack() as waiting:
        async with serving.connect() as first:
            assert (await first.ask(infer_post(BODY))).status == 200
        (counted,) = serving.plane.call_statistics.versions.values()
        for _ in range(10):
            assert not serving.plane.has_limits()
            serving.servable.blocked = trio.Event()
            async with serving.connect() as impatient:
                await impatient.send(infer_post(_BLOCK))
                await serving.wait_blocked()
                # A client that leaves before any call could end does not count; those of a tenth of a second are one.
                await trio.sleep(max(counted.fastest_success, 0.1))
            with trio.fail_after(WAIT_SECONDS):
                while serving.registry.in_flight():
                    await trio.testing.wait_all_tasks_blocked(0.01)
        for _ in range(8):
            serving.servable.blocked = trio.Event()
            connection = await waiting.enter_async_context(serving.connect())
            await connection.send(infer_post(_BLOCK))
            await serving.wait_blocked()
        async with serving.connect() as refused:
            answer = await refused.ask(infer_head(len(BODY), *extra))
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert answer.json["error"].startswith('"echo" is overloaded: 8 calls are under way')
        metrics = (serving.plane.render_metrics() or b"").decode()
        assert 'ovmstrio_rejected_requests_total{name="echo",reason="queue_full"} 1.0' in metrics


async def test_a_refused_large_body_ends_the_connection(tmp_path: Path) -> None:
    async with _limited(tmp_path, 1, 0) as serving, serving.connect() as first, serving.connect() as second:
        await first.send(infer_post(_BLOCK))
        await serving.wait_blocked()
        await second.send(infer_head(10 * 2**20) + b"." * 2**20)
        answer = await second.answer()
        assert (answer.status, answer.headers["connection"]) == (429, "close")


async def test_queued_calls_are_answered_in_order_and_leave_with_their_client(tmp_path: Path) -> None:
    async with _limited(tmp_path, 1, 3) as serving, serving.connect() as first:
        await first.send(infer_post(_BLOCK))
        await serving.wait_blocked()
        peers = []
        async with trio.open_nursery() as nursery:
            for number in range(3):
                peers.append(await nursery.start(_connected, serving))
                await peers[-1].send(infer_post(BODY.replace(b"0.5", b"%d" % number)))
                await _wait_queued(serving, number + 1)
            assert 'ovmstrio_queued_requests{name="echo"} 3.0' in (serving.plane.render_metrics() or b"").decode()
            await peers[1].stream.aclose()
            await _wait_queued(serving, 2)
            assert len(serving.servable.requests) == 1
            await first.stream.aclose()
            assert [(await peers[number].answer()).json["outputs"][0]["data"][0] for number in (0, 2)] == [0, 2]
            nursery.cancel_scope.cancel()
        event = serving.servable.requests[-1].event
        assert event is not None
        assert 0 < event.queue_seconds <= event.seconds
        assert len(serving.servable.requests) == 3


async def _connected(serving: Serving, *, task_status: trio.TaskStatus[Peer]) -> None:
    async with serving.connect() as peer:
        task_status.started(peer)
        await trio.sleep_forever()


def _raising(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "document"),
    [
        (KeyError("a secret"), 500, INTERNAL),
        (ExceptionGroup("several", [NotFound("not here"), KeyError("a secret")]), 404, {"error": "not here"}),
    ],
)
async def test_an_internal_error_is_logged_and_answered_without_details(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, document: dict[str, str]
) -> None:
    monkeypatch.setattr(serving.plane, "model_metadata", _raising(error))
    with capture_logs() as logs:
        answer = await serving.get("/v2/models/echo")
    assert (answer.status_code, answer.json()) == (status, document)
    assert [entry["exc_info"] for entry in logs if entry["log_level"] == "error"] == [error]
    assert (await serving.get("/v2")).status_code == 200


PREDICT = b'POST /v1/models/echo:predict HTTP/1.1\r\nHost: h\r\nContent-Length: 27\r\n\r\n{"inputs": {"x": [[0.5]]} }'


@pytest.mark.parametrize("request_bytes", [infer_post(), infer_post(BODY, "TE: trailers"), PREDICT])
async def test_an_internal_error_keeps_the_connection(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, request_bytes: bytes
) -> None:
    async with serving.connect() as peer:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(serving.servable, "infer", _raising(ZeroDivisionError("a secret")))
            answer = await peer.ask(request_bytes)
        assert (answer.status, answer.json) == (500, INTERNAL)
        assert [(entry["event"], entry["model"]) for entry in logs if entry["log_level"] == "error"] == [
            ("request failed", "echo")
        ]
        assert (await peer.ask(request_bytes)).status == 200


PAGE, ALLOW = {"Origin": "https://page.example"}, "access-control-allow-"


def _allowed(answer: Any) -> dict[str, str]:
    return {name.removeprefix(ALLOW): value for name, value in answer.headers.items() if name.startswith(ALLOW)}


async def test_other_origins_are_not_allowed_by_default(serving: Serving) -> None:
    assert _allowed(await serving.get("/v2", headers=PAGE)) == {}
    preflight = await serving.with_http(lambda client: client.options("/v2/models/echo/infer", headers=PAGE))
    assert preflight.status_code == 406


async def test_all_origins_may_be_allowed_for_every_path(tmp_path: Path) -> None:
    expected = {"origin": "*", "methods": "*", "headers": "*"}
    async with serving_rest(tmp_path, front_end={"cors": Cors("*")}) as server:
        assert _allowed(await server.get("/v2", headers=PAGE)) == expected
        assert _allowed(await server.get("/nothing", headers=PAGE)) == expected
        inference = await server.post("/v2/models/echo/infer", content=BODY, headers=PAGE)
        assert (inference.status_code, _allowed(inference)) == (200, expected)
        for path in ("/", "/v2/models/echo/infer", "/nothing/at/all"):
            preflight = await server.with_http(partial(httpx.Client.options, url=path, headers=PAGE))
            assert (preflight.status_code, preflight.content, _allowed(preflight)) == (200, b"", expected)


@pytest.mark.parametrize("credentials", [False, True])
async def test_a_preflight_gets_the_method_and_headers_that_it_requests(tmp_path: Path, *, credentials: bool) -> None:
    # To browsers, * does not include Authorization, and with credentials it includes nothing.
    requested = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-a"}
    cors = Cors("https://page.example", credentials=credentials)
    async with serving_rest(tmp_path, front_end={"cors": cors}) as server:
        headers = PAGE | requested
        preflight = await server.with_http(partial(httpx.Client.options, url="/v2/models/echo/infer", headers=headers))
    expected = {"origin": PAGE["Origin"], "methods": "POST", "headers": "authorization,x-a"}
    assert _allowed(preflight) == expected | ({"credentials": "true"} if credentials else {})


@pytest.mark.parametrize(
    ("origin", "named"), [("https://page.example", True), ("http://b", True), ("http://c", False), (None, False)]
)
async def test_a_listed_origin_is_allowed_by_its_name(tmp_path: Path, origin: str | None, *, named: bool) -> None:
    cors = Cors("https://page.example, http://b", "POST", "Content-Type", credentials=True)
    async with serving_rest(tmp_path, front_end={"cors": cors}) as server:
        answer = await server.get("/v2", headers={"Origin": origin} if origin else {})
    expected = {"origin": origin, "methods": "POST", "headers": "Content-Type", "credentials": "true"}
    assert _allowed(answer) == (expected if named else {})
    assert answer.headers["vary"] == "Origin"
