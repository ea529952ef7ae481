"""What OpenAI's API says of what is served, and of what is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ovmstrio.server.rest_front_end import make_router
from ovmstrio.wire.http.router import Route
from tests.support.text_encoders import WORDS, load_encoder
from tests.support.text_generators import CHAT, text_spec
from tests.unit.api.rest.servers import Serving, serving_rest


@pytest.mark.parametrize("prefix", ["/v3", "/v1", "/v3/v1"])
async def test_models_are_listed_and_those_that_make_text_come_first(serving: Serving, prefix: str) -> None:
    """Clients take the first one there is."""
    answer = await serving.get(f"{prefix}/models")

    assert answer.status_code == 200
    document = answer.json()
    assert document["object"] == "list"
    assert [each["id"] for each in document["data"]] == [CHAT, "echo"]
    assert {(each["object"], each["owned_by"], type(each["created"])) for each in document["data"]} == {
        ("model", "OVMS", int)
    }


async def test_what_makes_text_is_listed_before_what_makes_vectors(tmp_path: Path) -> None:
    """Whatever their names; what does nothing of this API comes last."""
    models: Any = (text_spec(tmp_path / "words", WORDS), text_spec(tmp_path / "writes", "writes"))
    async with serving_rest(tmp_path, models=models, loader=load_encoder) as serving:
        listed = (await serving.get("/v3/models")).json()["data"]

    assert [each["id"] for each in listed] == ["writes", WORDS, "echo"]


@pytest.mark.parametrize("prefix", ["/v3", "/v3/v1"])
async def test_one_model_is_told_by_its_name(serving: Serving, prefix: str) -> None:
    """Below both prefixes that are nobody else's."""
    answer = await serving.get(f"{prefix}/models/{CHAT}")

    assert (answer.status_code, answer.json()["id"]) == (200, CHAT)


async def test_the_path_that_two_apis_have_is_answered_with_what_both_say(serving: Serving) -> None:
    """TensorFlow Serving's clients find the state, OpenAI's the name."""
    document = (await serving.get(f"/v1/models/{CHAT}")).json()

    assert document["id"] == CHAT
    assert document["object"] == "model"
    assert document["model_version_status"][0]["state"] == "AVAILABLE"


async def test_the_state_of_one_version_is_tensorflow_servings_alone(serving: Serving) -> None:
    """As is that of what makes no text."""
    document = (await serving.get("/v1/models/echo/versions/2")).json()

    assert set(document) == {"model_version_status"}
    assert set((await serving.get("/v1/models/echo")).json()) == {"model_version_status"}


@pytest.mark.parametrize("name", ["nothing", "org/nothing"])
async def test_a_model_that_is_not_there_is_refused_in_openais_form(serving: Serving, name: str) -> None:
    """With the names of those that are."""
    answer = await serving.get(f"/v3/models/{name}")

    assert answer.status_code == 404
    assert answer.json() == {
        "error": {
            "message": f"The model `{name}` does not exist; there are: chat, echo",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


async def test_ovms_words_for_a_model_that_is_not_there_come_where_they_are_wished_for(ovms_serving: Serving) -> None:
    """Clients of OVMS may compare them."""
    answer = await ovms_serving.get("/v3/models/nothing")

    assert answer.status_code == 404
    assert answer.json() == {"error": "Mediapipe graph definition with requested name is not found"}


@pytest.mark.parametrize("prefix", ["/v3", "/v1", "/v3/v1"])
@pytest.mark.parametrize("path", ["/images/generations", "/images/edits"])
async def test_images_are_refused_with_the_reason(serving: Serving, prefix: str, path: str) -> None:
    """Below all prefixes."""
    answer = await serving.post(prefix + path, json={"model": CHAT, "prompt": "a cat"})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{prefix}{path}: this server makes no images"


async def test_a_path_that_is_none_is_refused_in_openais_form(serving: Serving) -> None:
    """Below OpenAI's own prefix."""
    answer = await serving.post("/v3/chat/completion", json={})

    assert answer.status_code == 404
    assert "there is no 'chat/completion' in this API" in answer.json()["error"]["message"]


async def test_the_wrong_method_of_a_path_is_refused_with_the_right_one(serving: Serving) -> None:
    """With the status that OpenAI's clients know."""
    answer = await serving.post("/v3/models", json={})

    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "POST /v3/models: use GET"


async def test_the_document_of_all_calls_has_an_example_for_each_path_that_works_as_it_is(serving: Serving) -> None:
    """With the models that answer it."""
    paths = (await serving.get("/openapi.json")).json()["paths"]

    asked = {path: told["post"] for path, told in paths.items() if path.startswith("/v3") and "post" in told}
    assert set(asked) == {"/v3/chat/completions", "/v3/completions", "/v3/responses"}
    for path, told in asked.items():
        assert told["description"] == f"models: {CHAT}"
        answer = await serving.post(path, json=told["requestBody"]["content"]["application/json"]["example"])
        assert answer.status_code == 200


async def test_health_is_where_programs_that_measure_servers_of_text_look_for_it(serving: Serving) -> None:
    """They need no more than the status; a server that drains is not healthy, and says why."""
    answer = await serving.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    head = await serving.with_http(lambda client: client.head("/health"))
    assert (head.status_code, head.content) == (200, b"")
    # A connection that begins with this question stays in the fast lane.
    found = make_router(serving.plane).find("GET", "/health")
    assert isinstance(found, Route)
    assert found.is_hot

    serving.plane.begin_drain()
    answer = await serving.get("/health")
    assert answer.status_code == 503
    assert "the server is shutting down" in answer.text
