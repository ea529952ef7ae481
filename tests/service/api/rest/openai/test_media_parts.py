"""Pictures, recordings and files in messages for models of text: refused by their places, and never looked at."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.api.rest.openai.talking import chat_body
from tests.support.text_generators import CHAT
from tests.unit.api.rest.servers import Serving

DATA = "data:image/png;base64," + "iVBORw0KGgo" * 20_000
PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": DATA}},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/picture.png"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url"},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/film.mp4"}},
    {"type": "file", "file": {"file_id": "file-1"}},
]
"""As OpenAI's clients and OVMS's send them; nothing listens at these addresses."""


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("part", PARTS, ids=[f"{number}-{part['type']}" for number, part in enumerate(PARTS)])
async def test_a_part_that_is_no_text_is_refused_by_its_place(
    serving: Serving, part: dict[str, Any], is_stream: bool
) -> None:
    """With OVMS's words, in a short answer that does not give its content back; text beside it does not help."""
    content = [{"type": "text", "text": "What is this?"}, part]
    body = {**chat_body(), "messages": [{"role": "user", "content": content}], "stream": is_stream}
    answer = await serving.post("/v3/chat/completions", json=body)
    error = answer.json()["error"]

    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == "messages[0].content[1].type"
    assert error["message"] == f"Unsupported content type; got '{part['type']}', and this model reads text only"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": DATA},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "input_file", "file_data": DATA},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    ],
)
async def test_responses_refuse_them_as_well(serving: Serving, part: dict[str, Any]) -> None:
    """By their places in the input."""
    item = {"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, part]}
    answer = await serving.post("/v1/responses", json={"model": CHAT, "input": [item]})
    error = answer.json()["error"]

    assert (answer.status_code, error["param"]) == (400, "input[0].content[1].type")
    assert error["message"] == f"Unsupported content type; got '{part['type']}', and this model reads text only"


async def test_a_part_without_a_type_and_one_of_a_type_that_nobody_knows_are_refused(serving: Serving) -> None:
    """All of them at once."""
    content = [{"text": "What?"}, {"type": "hologram"}, 5, {"type": "text"}]
    answer = await serving.post(
        "/v3/chat/completions", json={**chat_body(), "messages": [{"role": "user", "content": content}]}
    )
    message = answer.json()["error"]["message"]

    assert answer.status_code == 400
    for said in (
        "content object type missing",
        "Unsupported content type; got 'hologram', and expected text",
        "content array should contain objects",
        "content text missing",
    ):
        assert said in message
