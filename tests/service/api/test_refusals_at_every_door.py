from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import grpc
import pytest

from ovmstrio.access.key_file import digest_of
from ovmstrio.protocol.descriptors import message_class
from tests.support.all_kinds import write_all_kinds
from tests.support.callers import bearer
from tests.support.served_in_thread import ServedInThread, serving_in_thread

NOBODY: Final = "who calls must be known: send a key or a token as 'authorization: Bearer ...', or 'x-api-key'"
KSERVE: Final = "inference.GRPCInferenceService"
PIPELINE: Final = "baidu.paddle_serving.pipeline_serving"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    """Serve a service of every kind to known callers, of whom ``shop`` may call the model alone."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys.json"
    entry = {"name": "shop", "sha256": digest_of("shop"), "scopes": ["infer:model"]}
    keys.write_text(json.dumps({"callers": [entry]}))
    with serving_in_thread(config_path=write_all_kinds(folder), keys_file=keys) as served:
        yield served


def _lacks(scope: str) -> str:
    return f"'shop' may not do that: it needs the scope {scope}"


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
