from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import openai
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs
from tritonclient.utils import InferenceServerException

from ovmstrio.auth.authentication import Authentication, CallerDirectory
from ovmstrio.auth.gate import Gate
from ovmstrio.auth.key_file import key_hash
from ovmstrio.auth.quota import CallerQuota
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.callers import Permission, current_caller, release_caller
from ovmstrio.encoding.messages import message_class
from ovmstrio.protocols.grpc_gate import REQUIRED_SCOPES
from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.serving.authorization import AuthorizingDataPlane, CallerRecorder
from ovmstrio.telemetry.metrics import Metrics
from ovmstrio.telemetry.recent_history import RecentHistory
from tests.service.protocols.kserve.grpc.servers import RecordedCalls
from tests.support import ir
from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import INTERFACES, BothInterfaces, serving_both, with_channel
from tests.support.callers import bearer, entry_of, gate_of
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import BODY, infer_head, infer_post, serving_rest

SCOPES: Final = {
    "shop": "infer:add",
    "other": "infer:other",
    "reader": "read",
    "boss": "admin",
    "scraper": "metrics",
}


@pytest.fixture
def seen() -> RecordedCalls:
    return RecordedCalls()


@pytest.fixture
async def interfaces(
    tmp_path: Path, seen: RecordedCalls, request: pytest.FixtureRequest
) -> AsyncIterator[BothInterfaces]:
    path, limit = ir.save(ir.dummy(), tmp_path, "add"), getattr(request, "param", 0)
    spec = ModelSpec(name="add", base_path=path, max_concurrency=limit)
    async with serving_both([spec], gate=gate_of(SCOPES), observers=(CallerRecorder(), seen)) as both:
        yield both


def _infer(client: Any, module: Any, **options: Any) -> Any:
    tensor = module.InferInput("b", [1, 10], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 10), np.float32))
    return client.infer("add", [tensor], **options).as_numpy("a")


QUESTIONS: Final[dict[str, tuple[Callable[..., Any], set[str]]]] = {
    "infer": (_infer, {"shop"}),
    "metadata": (lambda client, _, **options: client.get_model_metadata("add", **options), {"shop", "reader", "boss"}),
    "ready": (lambda client, _, **options: client.is_model_ready("add", **options), {"shop", "reader", "boss"}),
    "all statistics": (
        lambda client, _, **options: client.get_inference_statistics(**options),
        {"reader", "boss"},
    ),
    "index": (lambda client, _, **options: client.get_model_repository_index(**options), {"reader", "boss"}),
    "log settings": (lambda client, _, **options: client.get_log_settings(**options), {"reader", "boss"}),
    "server": (lambda client, _, **options: client.get_server_metadata(**options), set(SCOPES)),
}


@pytest.mark.parametrize("interfaces", [0, 4], ids=["unlimited", "limited"], indirect=True)
@pytest.mark.parametrize("interface", INTERFACES)
async def test_tritonclient_calls_are_allowed_or_refused_by_scope(interfaces: BothInterfaces, interface: str) -> None:
    def work(client: Any, module: Any) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        for what, (ask, allowed) in QUESTIONS.items():
            for caller in SCOPES:
                if caller in allowed:
                    assert ask(client, module, headers=bearer(caller)) is not False, (what, caller)
                elif what != "ready" or interface == "grpc":
                    _assert_refused(
                        module, ask, client, bearer(caller), ("403", "PERMISSION_DENIED"), "lacks the scope"
                    )
            if what != "ready" or interface == "grpc":
                _assert_refused(module, ask, client, {}, ("401", "UNAUTHENTICATED"), "authentication required")
                _assert_refused(module, ask, client, bearer("x"), ("401", "UNAUTHENTICATED"), "unknown or expired key")

    await interfaces.with_triton(interface, work)


def _assert_refused(
    module: Any, ask: Callable[..., Any], client: Any, headers: dict[str, str], status: tuple[str, str], text: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        ask(client, module, headers=headers)
    assert any(code in str(caught.value.status()) for code in status), caught.value
    assert text in caught.value.message()


async def test_each_call_is_one_event_with_its_caller(interfaces: BothInterfaces, seen: RecordedCalls) -> None:
    for interface in INTERFACES:
        await interfaces.with_triton(interface, lambda client, module: _infer(client, module, headers=bearer("shop")))
        await interfaces.with_triton(
            interface, lambda client, _: client.get_model_metadata("add", headers=bearer("reader"))
        )
    calls = [(event.method, event.caller) for event in seen.events]
    assert calls == [("ModelInfer", "shop"), ("ModelMetadata", "reader")] * 2


async def test_forbidden_and_unknown_models_get_the_same_answer(interfaces: BothInterfaces) -> None:
    paths = ("/v2/models/add", "/v2/models/nothing")
    answers = [await interfaces.request("GET", path, headers=bearer("other")) for path in paths]
    assert [answer.status_code for answer in answers] == [403, 403]
    assert answers[0].text == answers[1].text


@pytest.mark.parametrize(
    ("path", "key", "status", "challenge"),
    [
        ("/v2/models", "", 401, 'Bearer realm="ovmstrio"'),
        ("/v2/models", "wrong", 401, 'Bearer realm="ovmstrio", error="invalid_token"'),
        ("/v2/models", "shop", 403, 'Bearer realm="ovmstrio", error="insufficient_scope", scope="read"'),
        ("/metrics", "boss", 403, 'Bearer realm="ovmstrio", error="insufficient_scope", scope="metrics"'),
        ("/no/such/path", "", 401, 'Bearer realm="ovmstrio"'),
        ("/no/such/path", "shop", 400, ""),
        ("/v2/health/ready", "", 200, ""),
        ("/v2/health/ready", "wrong", 200, ""),
        ("/health", "", 200, ""),
        ("/health", "wrong", 200, ""),
    ],
)
async def test_a_refusal_over_http_has_the_challenge_of_rfc_6750(
    interfaces: BothInterfaces, path: str, key: str, status: int, challenge: str
) -> None:
    answer = await interfaces.request("GET", path, headers={"x-api-key": key} if key else {})
    assert (answer.status_code, answer.headers.get("www-authenticate", "")) == (status, challenge)


INDEX = "/inference.GRPCInferenceService/RepositoryIndex"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize(
    ("path", "key", "status", "challenge"),
    [
        (INDEX, "", "UNAUTHENTICATED", 'Bearer realm="ovmstrio"'),
        (INDEX, "wrong", "UNAUTHENTICATED", 'Bearer realm="ovmstrio", error="invalid_token"'),
        (INDEX, "shop", "PERMISSION_DENIED", 'Bearer realm="ovmstrio", error="insufficient_scope", scope="read"'),
        (REFLECTION, "", "UNAUTHENTICATED", 'Bearer realm="ovmstrio"'),
        (REFLECTION, "shop", "PERMISSION_DENIED", 'Bearer realm="ovmstrio", error="insufficient_scope", scope="read"'),
        (REFLECTION, "reader", "OK", ""),
        ("/no.Such/Method", "", "UNAUTHENTICATED", 'Bearer realm="ovmstrio"'),
        ("/no.Such/Method", "reader", "UNIMPLEMENTED", ""),
        ("/grpc.health.v1.Health/Check", "", "OK", ""),
    ],
)
async def test_a_refusal_over_grpc_has_the_challenge_of_rfc_6750_in_a_trailer(
    interfaces: BothInterfaces, path: str, key: str, status: str, challenge: str
) -> None:
    def work(channel: grpc.Channel) -> tuple[str, str]:
        metadata = list(bearer(key).items()) if key else []
        call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=WAIT_SECONDS)
        with suppress(grpc.RpcError):
            list(call)
        return call.code().name, dict(call.trailing_metadata()).get("www-authenticate", "")

    assert await with_channel(interfaces.grpc, work) == (status, challenge)


@pytest.mark.parametrize("interface", INTERFACES)
async def test_refused_requests_are_counted_by_reason_without_keys(tmp_path: Path, interface: str) -> None:
    metrics, gate = Metrics(), gate_of(SCOPES)
    gate.refused = metrics.refused
    spec = ModelSpec(name="add", base_path=ir.save(ir.dummy(), tmp_path, "add"))

    def work(client: Any, module: Any) -> None:
        for key in ("", "secret", "other", "reader", "shop"):
            with suppress(InferenceServerException):
                _infer(client, module, headers=bearer(key) if key else {})

    async with serving_both([spec], gate=gate, metrics=metrics) as both:
        await both.with_triton(interface, work)
    text = metrics.render().decode()
    counted = dict(re.findall(r'(?m)^ovmstrio_auth_failures_total{reason="(\w+)"} (\S+)$', text))
    assert counted == {"nothing_shown": "1.0", "not_known": "1.0", "scope": "2.0"}
    assert "secret" not in text


@pytest.mark.parametrize("interface", INTERFACES)
async def test_changes_of_the_server_are_logged_with_caller_and_client(
    interfaces: BothInterfaces, interface: str
) -> None:
    def work(client: Any, _: Any) -> None:
        client.unregister_system_shared_memory(headers=bearer("boss"))
        with pytest.raises(Exception, match="lacks the scope admin"):
            client.unregister_system_shared_memory(headers=bearer("reader"))

    with capture_logs() as lines:
        await interfaces.with_triton(interface, work)
    changes = [(line["change"], line["caller"], line["client"]) for line in lines if line["event"] == "server changed"]
    assert changes == [("shared memory unregistered", "boss", "127.0.0.1")]


def test_every_grpc_method_has_a_required_scope_or_is_public() -> None:
    from ovmstrio.protocols.health.grpc_health import HealthService, OpenEndedCalls
    from ovmstrio.protocols.health.reflection import ReflectionService
    from ovmstrio.protocols.kserve.grpc_service import InferenceService
    from ovmstrio.protocols.tensorflow.grpc_service import ModelService, PredictionService

    fake: Any = None
    services: list[Any] = [
        InferenceService(fake),
        PredictionService(fake),
        ModelService(fake),
        HealthService(fake, fake),
    ]
    reflection = ReflectionService(services, fake, OpenEndedCalls())
    assert {path for each in (*services, reflection) for path in each.__mapping__()} == REQUIRED_SCOPES.keys()
    assert {path for path, need in REQUIRED_SCOPES.items() if need is Permission.NOTHING} == {
        *(f"/inference.GRPCInferenceService/Server{name}" for name in ("Live", "Ready")),
        *(f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")),
    }


async def test_only_routes_that_change_the_server_need_the_admin_scope_and_only_health_is_public(
    tmp_path: Path,
) -> None:
    async with serving_rest(tmp_path) as serving:
        rules = make_rest_router(serving.plane, history=RecentHistory(), console="on").rules
    needs = [(each.pattern.split("(")[0].rstrip("/?"), each.route.need) for each in rules]
    assert {path for path, need in needs if need is Permission.ADMIN} == {
        "/v1/config/reload",
        "/v2/repository/models",
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/v2/systemsharedmemory/region", "/v2/systemsharedmemory/unregister", "/v2/logging", "/v2/profile"),
        *("/v2/cudasharedmemory/region", "/v2/cudasharedmemory/unregister"),
        *("/console/api/reload", "/console/api/services", "/console/api/log_level"),
    }
    assert {path for path, need in needs if need is Permission.NOTHING} == {
        *("/health", "/v2/health/live", "/v2/health/ready", "/console", "/console/page"),
    }


async def test_a_caller_is_refused_before_its_body_is_received(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "front_end": {"gate": gate_of({"shop": "infer:echo"})},
        "plane_class": AuthorizingDataPlane,
    }
    async with serving_rest(tmp_path, **options) as serving:
        for lines in ((), ("TE: trailers",)):
            async with serving.connect() as peer:
                await peer.send(infer_head(1000, *lines))
                assert (await peer.answer()).status == 401
        async with serving.connect() as peer:
            assert (await peer.ask(infer_post())).status == 401
            assert (await peer.ask(infer_post(BODY, "X-Api-Key: shop"))).status == 200
            assert (await peer.ask(infer_post())).status == 401
        assert len(serving.servable.requests) == 1


async def test_concurrent_requests_of_a_caller_are_limited_until_their_end(tmp_path: Path) -> None:
    allowance = CallerQuota("shop", concurrency=1)
    options: dict[str, Any] = {"front_end": {"gate": gate_of({"shop": "infer:echo"}, allowance)}}
    waits = BODY[:-1] + b',"parameters":{"block":true}}'
    async with serving_rest(tmp_path, plane_class=AuthorizingDataPlane, **options) as serving:
        for lines in (("X-Api-Key: shop",), ("X-Api-Key: shop", "TE: trailers")):
            serving.servable.blocked = trio.Event()
            serving.servable.cancelled = trio.Event()
            async with serving.connect() as waiting, serving.connect() as peer:
                await waiting.send(infer_post(waits, *lines))
                await serving.wait_blocked()
                refused = await peer.ask(infer_post(BODY, *lines))
                assert (refused.status, refused.headers["retry-after"]) == (429, "1")
                assert "limit of 1 concurrent requests" in refused.json["error"]
            with trio.fail_after(WAIT_SECONDS):
                await serving.servable.cancelled.wait()
            await serving.wait_closed()
            assert allowance.in_flight == 0
            async with serving.connect() as peer:
                assert (await peer.ask(infer_post(BODY, *lines))).status == 200
            await serving.wait_closed()
            assert allowance.in_flight == 0


@pytest.mark.parametrize("line", ["Accept: x", "TE: trailers"], ids=["fast path", "application"])
async def test_a_client_that_leaves_the_queue_is_no_concurrent_request_any_more(tmp_path: Path, line: str) -> None:
    allowance = CallerQuota("shop", concurrency=2)
    options: dict[str, Any] = {"front_end": {"gate": gate_of({"shop": "infer:echo"}, allowance)}}
    waits = BODY[:-1] + b',"parameters":{"block":true}}'
    async with serving_rest(tmp_path, plane_class=AuthorizingDataPlane, **options) as serving:
        limits = {"max_concurrency": 1, "max_queue": 1}
        await serving.registry.apply([spec.model_copy(update=limits) for spec in serving.specs])
        async with serving.connect() as first:
            await first.send(infer_post(waits, "X-Api-Key: shop", line))
            await serving.wait_blocked()
            async with serving.connect() as queued:
                await queued.send(infer_post(BODY, "X-Api-Key: shop", line))
                await _wait_in_flight(allowance, 2)
            await _wait_in_flight(allowance, 1)
        await _wait_in_flight(allowance, 0)


async def _wait_in_flight(allowance: CallerQuota, count: int) -> None:
    with trio.fail_after(WAIT_SECONDS):
        while allowance.in_flight != count:
            await trio.testing.wait_all_tasks_blocked(0.005)


async def test_a_cached_credential_is_accepted_at_once_and_refusals_leave_no_trace() -> None:
    allowance = CallerQuota("shop", concurrency=1)
    gate = gate_of({"shop": "infer:echo"}, allowance)
    shown = [("authorization", "Bearer shop")]
    assert not gate.try_authenticate(Permission.INFER, "echo", shown)
    await gate.let_in(Permission.INFER, "echo", shown, None)
    release_caller()
    assert gate.try_authenticate(Permission.INFER, "echo", shown)
    assert current_caller.get() is not None
    assert allowance.in_flight == 1
    assert not gate.try_authenticate(Permission.INFER, "echo", shown)
    assert allowance.in_flight == 1
    release_caller()
    assert allowance.in_flight == 0
    for need, service, headers in (
        (Permission.INFER, "other", shown),
        (Permission.ADMIN, "", shown),
        (Permission.INFER, "echo", [("authorization", "Bearer wrong")]),
        (Permission.INFER, "echo", []),
    ):
        assert not gate.try_authenticate(need, service, headers)
        assert (current_caller.get(), allowance.in_flight) == (None, 0)


async def test_notes_of_headers_are_valid_until_callers_change_or_expire() -> None:
    now = [1000.0]
    directory = CallerDirectory(lambda: now[0])
    day = entry_of("day", "infer:*", expires="1970-01-02")
    directory.replace([entry_of("shop", "infer:*"), day])
    authentication = Authentication(directory, clock=lambda: now[0])
    gate = Gate(authentication)
    headers = {name: (("x", "y"), ("authorization", f"Bearer {name}")) for name in ("shop", "day", "nobody")}
    notes: dict[str, dict[object, Any]] = {name: {} for name in headers}

    def let_in() -> list[str]:
        return [
            name for name, shown in headers.items() if gate.try_authenticate(Permission.INFER, "", shown, notes[name])
        ]

    assert let_in() == []
    for name in ("shop", "day"):
        await gate.let_in(Permission.INFER, "", headers[name], None)
    assert let_in() == ["shop", "day"]
    assert [bool(noted) for noted in notes.values()] == [True, True, False]
    assert gate.try_authenticate(Permission.INFER, "", (), notes["shop"]), "they were read again"
    now[0] = 200_000.0
    assert let_in() == ["shop"]
    directory.replace([day])
    authentication.clear_cache()
    assert let_in() == []
    release_caller()


async def test_an_api_key_alone_guards_only_generation(tmp_path: Path) -> None:
    gate = gate_of({"secret": "infer:*"}, guards_everything=False)
    for need in Permission:
        if need is not Permission.GENERATE:
            assert await gate.let_in(need, "", (), None) is None
    caller = await gate.let_in(Permission.GENERATE, "llm", [("authorization", "Bearer secret")], None)
    assert caller is not None
    with pytest.raises(Exception, match="authentication required"):
        await gate.let_in(Permission.GENERATE, "llm", (), None)
    async with serving_rest(tmp_path, front_end={"gate": gate}) as serving, serving.connect() as peer:
        assert (await peer.ask(infer_post())).status == 200
        refused = await peer.ask(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
        listed = await peer.ask(b"GET /v3/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret\r\n\r\n")
        assert [each["id"] for each in listed.json["data"]] == ["echo"]


async def test_the_client_of_openai_lists_the_models_of_its_key(tmp_path: Path) -> None:
    options: dict[str, Any] = {"front_end": {"gate": gate_of({"shop": "infer:echo", "other": "infer:x*"})}}

    def listed(address: str, key: str) -> list[str]:
        with openai.OpenAI(base_url=f"http://{address}/v1", api_key=key, max_retries=0) as client:
            return [model.id for model in client.models.list().data]

    async with serving_rest(tmp_path, plane_class=AuthorizingDataPlane, **options) as serving:
        assert await trio.to_thread.run_sync(listed, serving.address, "shop") == ["echo"]
        assert await trio.to_thread.run_sync(listed, serving.address, "other") == []
        with pytest.raises(openai.AuthenticationError, match="unknown or expired key"):
            await trio.to_thread.run_sync(listed, serving.address, "wrong")


NOBODY: Final = "authentication required: send a key or token as 'authorization: Bearer ...' or 'x-api-key'"
KSERVE: Final = "inference.GRPCInferenceService"
PIPELINE: Final = "baidu.paddle_serving.pipeline_serving"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve a service of every kind to known callers, where ``shop`` may only call the model."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys.json"
    entry = {"name": "shop", "sha256": key_hash("shop"), "scopes": ["infer:model"]}
    keys.write_text(json.dumps({"callers": [entry]}))
    with serving_in_thread(config_path=write_all_kinds(folder), keys_file=keys) as served:
        yield served


def _lacks(scope: str) -> str:
    return f"'shop' lacks the scope {scope}"


def _plain(text: str, code: int) -> Any:
    del code
    return {"error": text}


def _openai(text: str, code: int) -> Any:
    kind, name = ("invalid_request_error", "invalid_api_key") if code == 401 else ("permission_error", None)
    return {"error": {"message": text, "type": kind, "param": None, "code": name}}


def _gateway(text: str, code: int) -> Any:
    return {"error": text, "code": {401: 16, 403: 7}[code], "message": text, "details": []}


APIS: Final = {
    "KServe": ("POST", "/v2/models/dag/infer", "infer:dag", _plain),
    "KServe's metadata": ("GET", "/v2/models/dag", "read", _plain),
    "generate": ("POST", "/v2/models/graph/generate", "infer:graph", _plain),
    "repository": ("POST", "/v2/repository/index", "read", _plain),
    "TensorFlow Serving": ("POST", "/v1/models/dag:predict", "infer:dag", _plain),
    "reload": ("POST", "/v1/config/reload", "admin", _plain),
    "OpenAI": ("POST", "/v3/chat/completions", "infer:graph", _openai),
    "Paddle Serving": ("POST", "/ops/prediction", "infer:ops", _gateway),
    "metrics": ("GET", "/metrics", "metrics", _plain),
    "console": ("GET", "/console/api/services", "read", _plain),
    "profile": ("POST", "/v2/profile", "admin", _plain),
}


@pytest.mark.parametrize("api", APIS)
def test_a_refusal_over_rest_has_the_form_of_its_api(server: ServedInThread, api: str) -> None:
    method, path, scope, form = APIS[api]
    body = {"model": "graph", "messages": []} if api == "OpenAI" else {}
    stranger = server.ask(method, path, json=body)
    assert (stranger.status_code, stranger.json()) == (401, form(NOBODY, 401))
    assert stranger.headers["www-authenticate"].startswith("Bearer")
    shop = server.ask(method, path, json=body, headers=bearer("shop"))
    assert (shop.status_code, shop.json()) == (403, form(_lacks(scope), 403))


def test_a_refusal_of_a_handler_is_a_text(server: ServedInThread) -> None:
    assert server.ask("POST", "/handler", json=[1]).status_code == 401
    refused = server.ask("POST", "/handler", json=[1], headers=bearer("shop"))
    assert (refused.status_code, refused.text) == (403, _lacks("infer:handler"))


def _call(channel: grpc.Channel, path: str, message: tuple[str, dict[str, Any]] | None, metadata: Any) -> None:
    if message is None:
        list(channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=60))
    else:
        name, fields = message
        channel.unary_unary(path)(message_class(name)(**fields).SerializeToString(), metadata=metadata, timeout=60)


@pytest.mark.parametrize(
    ("path", "body", "scope"),
    [
        (f"{KSERVE}/ModelInfer", ("inference.ModelInferRequest", {"model_name": "dag"}), "infer:dag"),
        (f"{KSERVE}/ModelMetadata", ("inference.ModelMetadataRequest", {"name": "dag"}), "read"),
        (f"{KSERVE}/RepositoryIndex", ("inference.RepositoryIndexRequest", {}), "read"),
        (
            "tensorflow.serving.PredictionService/Predict",
            ("tensorflow.serving.PredictRequest", {"model_spec": {"name": "dag"}}),
            "infer:dag",
        ),
        (f"{PIPELINE}.PipelineService/inference", (f"{PIPELINE}.Request", {"name": "ops"}), "infer:ops"),
        ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", None, "read"),
    ],
)
def test_a_refusal_over_grpc_is_a_status(
    server: ServedInThread, path: str, body: tuple[str, dict[str, Any]] | None, scope: str
) -> None:
    found = []
    with grpc.insecure_channel(server.grpc) as channel:
        for metadata in ((), tuple(bearer("shop").items())):
            with pytest.raises(grpc.RpcError) as caught:
                _call(channel, f"/{path}", body, metadata)
            error: Any = caught.value
            found.append((error.code().name, error.details()))
    assert found == [("UNAUTHENTICATED", NOBODY), ("PERMISSION_DENIED", _lacks(scope))]
