from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import pytest
import trio
from httpx import Response

from ovmstrio.core.errors import InvalidField, ModelFailure, Overloaded
from ovmstrio.core.images import ImageFormat, ImagePart, ImageRequest
from tests.service.protocols.openai.servers import (
    BRUSH,
    CHAT,
    PREFIXES,
    events_of,
    expect_cancelled_on_disconnect,
    post_of,
    serve_openai,
    service_of,
)
from tests.unit.protocols.servers import Serving

GENERATIONS, EDITS, VARIATIONS = (f"/v3/images/{name}" for name in ("generations", "edits", "variations"))
PROMPT = "a cat"
PARTIAL = ImagePart((b"blurred",), (8, 16), is_partial=True)


async def _generate(serving: Serving, path: str = GENERATIONS, **fields: Any) -> Response:
    body = {"model": BRUSH, "prompt": PROMPT, **fields}
    return await serving.post(path, json={name: value for name, value in body.items() if value is not ...})


async def _edit(serving: Serving, path: str = EDITS, *, mask: bytes = b"", **fields: Any) -> Response:
    files = {"image": ("a.png", b"picture", "image/png")} | ({"mask": ("m.png", mask, "image/png")} if mask else {})
    prompt = {} if path.endswith("variations") else {"prompt": PROMPT}
    return await serving.post(path, data={"model": BRUSH, **prompt, **fields}, files=files)


def _images(document: Any) -> list[bytes]:
    return [base64.b64decode(each["b64_json"]) for each in document["data"]]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_prompt_is_answered_with_images(serving: Serving, prefix: str) -> None:
    document = (await _generate(serving, f"{prefix}/images/generations")).json()
    assert _images(document) == [b"first", b"second"]
    assert (document["size"], document["output_format"], document["background"]) == ("8x16", "png", "opaque")
    assert document["created"] > 1_700_000_000
    assert service_of(serving, BRUSH).requests == [ImageRequest(PROMPT)]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_images_are_changed_varied_and_repainted(serving: Serving, prefix: str) -> None:
    edits, variations = f"{prefix}/images/edits", f"{prefix}/images/variations"
    answers = [
        await _edit(serving, edits, strength="0.5", n="2", stream="false"),
        await _edit(serving, edits, mask=b"area", size="32x64", seed="5", user="true", background="opaque"),
        await _edit(serving, variations, n="2", response_format="b64_json", output_format="jpeg"),
    ]
    assert [answer.text for answer in answers if answer.status_code != 200] == []
    assert [_images(answer.json()) for answer in answers] == [[b"first", b"second"]] * 3
    options: dict[str, Any] = {"width": 32, "height": 64, "rng_seed": 5}
    assert service_of(serving, BRUSH).requests == [
        ImageRequest(PROMPT, b"picture", options={"strength": 0.5, "num_images_per_prompt": 2}),
        ImageRequest(PROMPT, b"picture", b"area", options),
        ImageRequest("", b"picture", options={"num_images_per_prompt": 2}, form=ImageFormat.JPEG),
    ]


async def test_fields_of_ovms_and_openai_reach_the_service(serving: Serving) -> None:
    texts: dict[str, Any] = {
        "prompt_2": "b",
        "prompt_3": "c",
        "negative_prompt": "d",
        "negative_prompt_2": "e",
        "negative_prompt_3": "f",
    }
    numbers: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 2, "max_sequence_length": 64}
    numbers["rng_seed"] = 2**40
    sizes: dict[str, Any] = {"width": 512, "height": 256}
    files: dict[str, Any] = {"output_format": "webp", "output_compression": 40}
    neutral: dict[str, Any] = {"quality": "auto", "moderation": "low", "style": None, "lora_alphas": {}, "strength": 1}
    await _generate(serving, **texts, **numbers, **sizes, **files, **neutral, num_images_per_prompt=2)
    await _generate(serving, size="auto", n=2, seed=3, rng_seed=3)
    await _generate(serving, size="512x256", width=512, quality="standard")
    expected: dict[str, Any] = {**texts, **numbers, **sizes, "num_images_per_prompt": 2, "strength": 1.0}
    assert service_of(serving, BRUSH).requests == [
        ImageRequest(PROMPT, options=expected, form=ImageFormat.WEBP, compression=40),
        ImageRequest(PROMPT, options={"num_images_per_prompt": 2, "rng_seed": 3}),
        ImageRequest(PROMPT, options=sizes),
    ]


@pytest.mark.parametrize(("path", "kind"), [(GENERATIONS, "image_generation"), (EDITS, "image_edit")])
async def test_streams_have_partial_images_and_the_final_one(serving: Serving, path: str, kind: str) -> None:
    service = service_of(serving, BRUSH)
    service.steps = (PARTIAL, ImagePart((b"final",), (8, 16)))
    if path == EDITS:
        answer = await _edit(serving, stream="true", partial_images="1")
    else:
        answer = await _generate(serving, stream=True, partial_images=1)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.startswith(f"event: {kind}.partial_image\n")
    partial, final = events_of(answer.text)
    assert (partial["type"], partial["partial_image_index"]) == (f"{kind}.partial_image", 0)
    assert (final["type"], final["size"], final["output_format"]) == (f"{kind}.completed", "8x16", "png")
    assert [base64.b64decode(each["b64_json"]) for each in (partial, final)] == [b"blurred", b"final"]
    assert service.requests[0].partial_images == 1


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ...}, "prompt", "prompt field is missing"),
    ({"prompt": 5}, "prompt", "prompt field is not a string; got 5"),
    ({"prompt": "x" * 32_001}, "prompt", "prompt: expected at most 32000 characters; got 32001"),
    ({"negative_prompt": "x" * 32_001}, "negative_prompt", "at most 32000 characters"),
    ({"response_format": "url"}, "response_format", "the server stores no images; use b64_json"),
    ({"size": "big"}, "size", "size field is not in correct format - WxH, such as 512x512; got 'big'"),
    ({"size": "0x512"}, "size", "not in correct format"),
    ({"size": 512}, "size", "size field is not a string"),
    ({"size": "512x512", "width": 256}, "size", "size and width or height differ"),
    ({"n": 0}, "n", "n must be higher than 0; got 0"),
    ({"n": 1.5}, "n", "n is not an unsigned integer"),
    ({"n": 2, "num_images_per_prompt": 3}, "num_images_per_prompt", "another name of n"),
    ({"seed": 1, "rng_seed": 2}, "rng_seed", "another name of seed"),
    ({"seed": -1}, "seed", "seed field is not an unsigned integer"),
    ({"seed": 2**63}, "seed", "seed field is not an unsigned integer"),
    ({"num_inference_steps": 0}, "num_inference_steps", "must be higher than 0"),
    ({"guidance_scale": "high"}, "guidance_scale", "guidance_scale is not a valid number"),
    ({"strength": 0.5}, "strength", "strength requires an image: use /images/edits"),
    ({"strength": 1.5}, "strength", "strength out of range(0.0, 1.0)"),
    ({"output_format": "svg"}, "output_format", "output_format should be one of png, jpeg, webp"),
    ({"output_compression": 50}, "output_compression", "requires output_format jpeg or webp"),
    ({"output_format": "webp", "output_compression": 101}, "output_compression", "should be from 0 to 100"),
    ({"partial_images": 2}, "partial_images", "partial_images requires stream true"),
    ({"partial_images": 4, "stream": True}, "partial_images", "partial_images should be from 0 to 3"),
    ({"stream": True, "n": 2}, "n", "n should be 1 in a stream; got 2"),
    ({"background": "transparent"}, "background", "background should be one of auto, opaque"),
    ({"quality": "high"}, "quality", "use num_inference_steps"),
    ({"style": "vivid"}, "style", "describe the style in the prompt"),
    ({"lora_alphas": {"a": 1}}, "lora_alphas", "image models have no LoRA adapters"),
    ({"image": "x"}, "image", "use /images/edits"),
    ({"steps": 5}, "steps", "Unknown parameter: 'steps'"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
async def test_a_bad_field_is_refused_before_the_service_is_called(
    serving: Serving, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = await _generate(serving, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]
    assert service_of(serving, BRUSH).requests == []


@pytest.mark.parametrize(
    ("path", "options", "param", "message"),
    [
        (EDITS, {"json": {"model": BRUSH}}, "content-type", "expected the image as part 'image' of multipart"),
        (EDITS, {"files": {"model": (None, BRUSH)}}, "image", "send the image as a part of this name"),
        (
            EDITS,
            {"files": [("image[]", ("a", b"x")), ("image[]", ("b", b"x"))]},
            "image",
            "expected one file; got several",
        ),
        (EDITS, {"files": {"image": ("a", b"x"), "model": (None, BRUSH)}}, "prompt", "prompt field is missing"),
        (VARIATIONS, {"files": {"image": ("a", b""), "model": (None, BRUSH)}}, "image", "image: the file is empty"),
        (
            VARIATIONS,
            {"files": {"image": ("a", b"x"), "model": (None, BRUSH), "prompt": (None, "x")}},
            "prompt",
            "use /images/edits",
        ),
        (
            VARIATIONS,
            {"files": {"image": ("a", b"x"), "model": (None, BRUSH), "mask": ("m", b"x")}},
            "mask",
            "use /images/edits",
        ),
        (
            EDITS,
            {"files": {"image": ("a", b"x"), "model": (None, BRUSH), "prompt": (None, "x"), "n": (None, "two")}},
            "n",
            "",
        ),
    ],
)
async def test_bad_forms_are_refused(serving: Serving, path: str, options: Any, param: str, message: str) -> None:
    answer = await serving.post(path, **options)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("failure", "status", "error"),
    [
        (InvalidField("unknown", field="size"), 400, {"param": "size", "message": "unknown"}),
        (Overloaded("full", retry_after_seconds=3), 429, {"code": "rate_limit_exceeded"}),
        (ModelFailure("it has ended"), 500, {"message": "it has ended"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_image_has_a_status(
    serving: Serving, stream: bool, failure: Exception, status: int, error: dict[str, Any]
) -> None:
    service_of(serving, BRUSH).refusal = failure
    answer = await _generate(serving, stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"].items() >= error.items()


async def test_other_services_are_refused(serving: Serving) -> None:
    answer = await _generate(serving, model=CHAT)
    assert answer.json()["error"]["message"] == 'the service "chat" does no image_generation; it does text_generation'


async def test_a_deadline_ends_the_request(serving: Serving) -> None:
    service = service_of(serving, BRUSH)
    service.steps = (PARTIAL, trio.Event())
    body = {"model": BRUSH, "prompt": PROMPT}
    late = await serving.post(GENERATIONS, json=body, headers={"x-request-timeout": "0.05"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert service.left.is_set()
    assert service.requests[0].deadline < math.inf


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_its_request(serving: Serving, stream: bool) -> None:
    service_of(serving, BRUSH).steps = (trio.Event(),)
    request = post_of(GENERATIONS, {"model": BRUSH, "prompt": PROMPT, "stream": stream})
    await expect_cancelled_on_disconnect(serving, BRUSH, request)


async def test_images_above_the_message_size_limit_are_refused(tmp_path: Path) -> None:
    async with serve_openai(tmp_path, front_end={"max_body_bytes": 4096}) as server:
        statuses = []
        for size in (4097, 4096):
            service_of(server, BRUSH).steps = (ImagePart((bytes(size),), (8, 16)),)
            statuses.append((await _generate(server)).status_code)
    assert statuses == [413, 200]


async def test_large_images_are_answered_completely(serving: Serving) -> None:
    files = (bytes(range(256)) * 2000, b"small")
    service_of(serving, BRUSH).steps = (ImagePart(files, (8, 16)),)
    assert _images((await _generate(serving)).json()) == list(files)


async def test_errors_have_the_form_of_ovms_on_request(ovms_serving: Serving) -> None:
    ignored = await _generate(ovms_serving, unknown=1)
    refused = await _generate(ovms_serving, size="big")
    assert ignored.status_code == 200
    assert refused.status_code == 400
    assert "size field is not in correct format - WxH" in refused.json()["error"]
