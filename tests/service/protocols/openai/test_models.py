from __future__ import annotations

import pytest

from ovmstrio.server.front_ends import make_rest_router
from ovmstrio.transport.http.router import Route
from tests.service.protocols.openai.servers import BRUSH, CHAT, EARS, PREFIXES, VOICE, WORDS
from tests.unit.protocols.servers import Serving

PREFIX = pytest.mark.parametrize("prefix", PREFIXES)
LISTED = [CHAT, BRUSH, EARS, VOICE, WORDS, "echo"]


@PREFIX
async def test_models_that_make_text_are_listed_first(serving: Serving, prefix: str) -> None:
    answer = await serving.get(f"{prefix}/models")
    assert answer.status_code == 200
    document = answer.json()
    assert document["object"] == "list"
    assert [each["id"] for each in document["data"]] == LISTED
    assert {(each["object"], each["owned_by"], type(each["created"])) for each in document["data"]} == {
        ("model", "OVMS", int)
    }
    assert {each["id"]: each["max_model_len"] for each in document["data"] if "max_model_len" in each} == {CHAT: 1000}


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        (f"/v3/models/{CHAT}", {"id", "object", "created", "owned_by", "max_model_len"}),
        (f"/v3/v1/models/{CHAT}", {"id", "object", "created", "owned_by", "max_model_len"}),
        (f"/v1/models/{CHAT}", {"id", "object", "created", "owned_by", "max_model_len", "model_version_status"}),
        ("/v1/models/echo", {"model_version_status"}),
        ("/v1/models/echo/versions/2", {"model_version_status"}),
    ],
)
async def test_a_model_is_described_by_one_api_or_both(serving: Serving, path: str, keys: set[str]) -> None:
    document = (await serving.get(path)).json()
    assert set(document) == keys
    assert (document.get("id", CHAT), document.get("object", "model")) == (CHAT, "model")
    states = [each["state"] for each in document.get("model_version_status", [{"state": "AVAILABLE"}])]
    assert set(states) == {"AVAILABLE"}


@pytest.mark.parametrize("name", ["nothing", "org/nothing"])
async def test_an_unknown_model_is_refused_with_the_known_ones(serving: Serving, name: str) -> None:
    answer = await serving.get(f"/v3/models/{name}")
    assert answer.status_code == 404
    assert answer.json() == {
        "error": {
            "message": f"The model `{name}` does not exist; available: brush, chat, ears, echo, voice, words",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


async def test_an_unknown_model_is_refused_in_the_form_of_ovms_on_request(ovms_serving: Serving) -> None:
    answer = await ovms_serving.get("/v3/models/nothing")
    assert answer.status_code == 404
    assert answer.json() == {"error": "Mediapipe graph definition with requested name is not found"}


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        *((f"{prefix}/images/generations", 400, "does no image_generation; it") for prefix in PREFIXES),
        ("/v3/chat/completion", 404, "unknown path 'chat/completion'"),
        ("/v3/models", 405, "POST /v3/models: use GET"),
        ("/v1/chat/completion", 404, "unknown path '/v1/chat/completion'"),
        ("/v1/chat/completions/7", 404, "unknown path"),
        ("/v1/assistants", 404, "unknown path"),
        ("/v1/", 404, "unknown path"),
    ],
)
async def test_unsupported_paths_are_refused(serving: Serving, path: str, status: int, message: str) -> None:
    answer = await serving.post(path, json={"model": CHAT, "prompt": "a cat"})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_wrong_methods_below_v1_are_refused_in_the_form_of_openai(serving: Serving) -> None:
    answer = await serving.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "GET /v1/chat/completions: use POST"


@pytest.mark.parametrize("path", ["/v1/models/chat/x", "/v1/config/x", "/v9/x"])
async def test_unknown_paths_of_other_apis_are_refused_in_the_form_of_ovms(serving: Serving, path: str) -> None:
    answer = await serving.post(path, json={})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(f"Invalid request URL - POST {path}")


async def test_unknown_paths_are_refused_in_the_form_of_ovms_on_request(ovms_serving: Serving) -> None:
    answer = await ovms_serving.post("/v1/assistants", json={})
    assert (answer.status_code, answer.json()) == (400, {"error": "Invalid request URL - POST /v1/assistants"})


async def test_examples_of_the_openapi_document_are_answered(serving: Serving) -> None:
    paths = (await serving.get("/openapi.json")).json()["paths"]
    apis = ("/v3", "/v1", "/api")
    posts = {path: each["post"] for path, each in paths.items() if path.startswith(apis) and "post" in each}
    assert {path: post["description"] for path, post in posts.items()} == {
        **dict.fromkeys(("/v3/chat/completions", "/v3/completions", "/v3/responses"), f"models: {CHAT}"),
        **dict.fromkeys(("/v1/messages", "/api/chat", "/api/generate"), f"models: {CHAT}"),
        **dict.fromkeys(("/v3/embeddings", "/v3/pooling", "/v3/rerank", "/v3/score", "/api/embed"), f"models: {WORDS}"),
        "/v3/audio/speech": f"models: {VOICE}",
        "/v3/images/generations": f"models: {BRUSH}",
    }
    for path, post in posts.items():
        example = post["requestBody"]["content"]["application/json"]["example"]
        assert (await serving.post(path, json=example)).status_code == 200


async def test_health_is_served_at_the_path_of_load_generators(serving: Serving) -> None:
    answer = await serving.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    head = await serving.with_http(lambda client: client.head("/health"))
    assert (head.status_code, head.content) == (200, b"")
    # A connection whose first request is a health check stays in the fast lane.
    found = make_rest_router(serving.plane).find("GET", "/health")
    assert isinstance(found, Route)
    assert found.is_hot
    serving.plane.begin_drain()
    answer = await serving.get("/health")
    assert answer.status_code == 503
    assert "the server is shutting down" in answer.text
