from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support.graphs import llm_graph
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.tiny_llava import EXACT, data_url, image_file, noise, write_tiny_llava
from tests.support.waits import until

TOKENS: Final = 16
_LIBRARY: Final = """
import json, sys, openvino as ov, openvino_genai as genai
from tests.support.tiny_llava import noise
pipeline = genai.VLMPipeline(sys.argv[1], "CPU", ATTENTION_BACKEND="SDPA", **json.loads(sys.argv[2]))
results = []
for prompt, images in json.loads(sys.argv[3]):
    made = pipeline.generate(prompt, images=[ov.Tensor(noise(*image)) for image in images],
                             max_new_tokens=int(sys.argv[4]), ignore_eos=True)
    results.append([made.texts[0], made.perf_metrics.get_num_input_tokens()])
print(json.dumps(results))
"""

Part = str | tuple[int, int, int]
"""A text, or seed, width and height of an image."""

CASES: Final[list[list[Part]]] = [
    [(1, 60, 40), "What?"],
    [(2, 60, 40), "What?"],
    [(1, 60, 40), "Why?"],
    [(3, 200, 90), "\n\nWhat?"],
    ["Compare:", (1, 60, 40), "with the second one:", (3, 200, 90), "and answer."],
    [(1, 60, 40), (2, 60, 40)],
    ["only text"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def server(folder: Path, media: Path) -> Iterator[ServedInThread]:
    """Serve a graph as OpenVINO Model Server writes it for such a model."""
    properties = f"plugin_config: '{json.dumps(EXACT)}',"
    graph = llm_graph("pipeline_type: VLM_CB,", properties, "enable_prefix_caching: true, cache_size: 1")
    (folder / "graph.pbtxt").write_text(graph)
    with serving_in_thread(model_path=str(folder), model_name="eyes", allowed_local_media_path=media) as made:
        yield made


def _content(parts: list[Part]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(image_file(noise(*part))), "detail": "low"}}
        for part in parts
    ]


def _body(content: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "eyes", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
    return {**body, "temperature": 0, "ignore_eos": True, **more}


def _ask(server: ServedInThread, content: Any, **more: Any) -> Any:
    answer = server.ask("POST", "/v3/chat/completions", json=_body(content, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def _refusal(server: ServedInThread, content: Any, **more: Any) -> Any:
    answer = server.ask("POST", "/v3/chat/completions", json=_body(content, **more))
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def _texts_of_library(folder: Path, cases: list[list[Part]]) -> list[list[Any]]:
    prompts = []
    for case in cases:
        images = [part for part in case if not isinstance(part, str)]
        marks = iter(range(len(images)))
        parts = [part if isinstance(part, str) else f"<ov_genai_image_{next(marks)}>" for part in case]
        prompts.append(["\n".join(parts), images])
    command = [sys.executable, "-c", _LIBRARY, str(folder), json.dumps(EXACT), json.dumps(prompts), str(TOKENS)]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    results: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_texts_about_images_are_those_of_openvino_genai(server: ServedInThread, folder: Path) -> None:
    expected = _texts_of_library(folder, CASES)
    with ThreadPoolExecutor() as pool:
        together = list(pool.map(lambda case: _ask(server, _content(case)), CASES * 2))
    for answer, (text, tokens) in zip(together, expected * 2, strict=True):
        assert answer["choices"][0]["message"]["content"] == text
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (tokens, TOKENS)
    assert len({text for text, _ in expected}) == len(CASES)


def test_images_of_other_apis_are_those_of_chats(server: ServedInThread) -> None:
    images = [base64.b64encode(image_file(noise(*image))).decode() for image in ((1, 60, 40), (3, 200, 90))]
    chat = _ask(server, _content([(1, 60, 40), (3, 200, 90), "What?"]), ignore_eos=False)
    text, tokens = chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"]
    sources = [{"type": "base64", "media_type": "image/png", "data": data} for data in images]
    blocks = [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": "What?"}]
    body = {"model": "eyes", "messages": [{"role": "user", "content": blocks}]}
    message = server.ask("POST", "/v1/messages", json={**body, "max_tokens": TOKENS, "temperature": 0}).json()
    counted = server.ask("POST", "/v1/messages/count_tokens", json=body).json()
    usage = message["usage"]
    assert message["content"] == [{"type": "text", "text": text}]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"] == tokens
    asked: dict[str, Any] = {"model": "eyes", "stream": False, "options": {"num_predict": TOKENS, "temperature": 0}}
    messages = [{"role": "user", "content": "What?", "images": images}]
    answer = server.ask("POST", "/api/chat", json={**asked, "messages": messages}).json()
    assert (answer["message"]["content"], answer["prompt_eval_count"]) == (text, tokens)
    made = server.ask("POST", "/api/generate", json={**asked, "prompt": "What?", "images": images}).json()
    assert (made["response"], made["prompt_eval_count"]) == (text, tokens)
    wrong = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "?"}}
    bad = {"model": "eyes", "max_tokens": 1, "messages": [{"role": "user", "content": [wrong]}]}
    refused = server.ask("POST", "/v1/messages", json=bad).json()["error"]["message"]
    assert "messages[0].content[0].source" in refused
    messages = [{"role": "user", "content": "What?", "images": [images[0], "?"]}]
    refused = server.ask("POST", "/api/chat", json={**asked, "messages": messages}).json()["error"]
    assert "messages[0].images[1]" in refused
    assert "vision" in server.ask("POST", "/api/show", json={"model": "eyes"}).json()["capabilities"]


def test_responses_and_streams_of_images_have_the_texts_of_chats(server: ServedInThread) -> None:
    case = CASES[4]
    parts = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in _content(case)
    ]
    given = {"model": "eyes", "input": [{"role": "user", "content": parts}]}
    counted = server.ask("POST", "/v3/responses/input_tokens", json=given).json()
    answer = _ask(server, _content(case))
    assert counted["input_tokens"] == answer["usage"]["prompt_tokens"]
    body = {**given, "max_output_tokens": TOKENS}
    response = server.ask("POST", "/v3/responses", json={**body, "temperature": 0, "ignore_eos": True}).json()
    assert response["output"][0]["content"][0]["text"] == answer["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]
    streamed = server.ask(
        "POST",
        "/v3/chat/completions",
        json=_body(_content(case), stream=True, stream_options={"include_usage": True}),
    )
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == answer["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_prefix_of_a_prompt_with_an_image_is_cached(server: ServedInThread) -> None:
    def cached(seed: int) -> int:
        usage = _ask(server, _content([(seed, 60, 40), "Which animal is this?"]))["usage"]
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [cached(90), cached(90), cached(91), cached(90)] == [0, 32, 0, 32]


def test_answers_about_images_follow_a_grammar(server: ServedInThread) -> None:
    form = {"type": "regex", "regex": "yes|no"}
    answer = _ask(server, _content(CASES[0]), response_format=form, ignore_eos=False)
    assert answer["choices"][0]["message"]["content"] in {"yes", "no"}


def test_several_texts_about_an_image(server: ServedInThread) -> None:
    one, two = _ask(server, _content(CASES[0]), n=2)["choices"]
    assert one["message"]["content"] == two["message"]["content"]


def test_request_about_an_image_ends_with_its_client(server: ServedInThread) -> None:
    body = _body(_content(CASES[0]), stream=True, max_tokens=1500)
    url = f"{server.rest}/v3/chat/completions"
    with (
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream("POST", url, json=body) as streamed,
    ):
        lines = streamed.iter_lines()
        while '"content":"' not in next(lines):
            pass
        assert _ask(server, _content(CASES[1]))["usage"]["completion_tokens"] == TOKENS
    running = 'ovmstrio_llm_requests_running{model_name="eyes"} 0'
    until(lambda: running in server.ask("GET", "/metrics").text)


def test_completions_read_tokens_of_texts(server: ServedInThread) -> None:
    def complete(prompt: Any, **more: Any) -> httpx.Response:
        body = {"model": "eyes", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        return server.ask("POST", "/v3/completions", json=body)

    tokens = server.ask("POST", "/v3/tokenize", json={"model": "eyes", "text": "a text"}).json()["tokens"]
    assert complete(tokens).json()["choices"][0]["text"] == complete("a text").json()["choices"][0]["text"]
    for fields, field in (({"echo": True, "logprobs": 1}, "echo"), ({"prompt_logprobs": 0}, "prompt_logprobs")):
        refused = complete("a text", **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert "is not supported for a model that takes images" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}, "accepts text and images"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "accepts text and images"),
        ({"type": "image_url"}, "messages[0].content[0].image_url is missing"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url.url is not a string"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "most"}}, "auto, low, high, original"),
        ({"type": "input_image", "file_id": "file-1"}, "files are not supported"),
        ({"type": "image_url", "image_url": "ftp://h/x.png"}, "expected a data, http, https or file URL"),
        ({"type": "image_url", "image_url": "https://example.com/x.png"}, "--allowed-media-domains"),
        ({"type": "image_url", "image_url": "data:image/png;base64,$"}, "no valid base64"),
        ({"type": "image_url", "image_url": "data:image/png"}, "no comma"),
        ({"type": "image_url", "image_url": data_url(b"<svg/>")}, "not an image of a known format"),
        ({"type": "image_url", "image_url": data_url(image_file(noise(1))[:900])}, "image cannot be read"),
        ({"type": "text", "text": "<ov_genai_image_0>"}, "has a mark of images"),
    ],
)
def test_invalid_parts_are_refused_with_their_path(server: ServedInThread, part: dict[str, Any], words: str) -> None:
    error = _refusal(server, [part, {"type": "text", "text": "What?"}])
    assert words in error["message"]
    assert error["param"].startswith("messages[0].content[0]")


def _png(width: int, height: int) -> bytes:
    """Return the begin of a PNG of one bit per pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_images_with_too_many_pixels_are_refused(server: ServedInThread) -> None:
    for side, words in ((50_000, "(2500000000 pixels) exceeds limit"), (7000, "7000 x 7000 pixels exceed the limit")):
        bomb = {"type": "image_url", "image_url": {"url": data_url(_png(side, side))}}
        assert words in _refusal(server, [bomb])["message"]
    large = {"type": "image_url", "image_url": {"url": data_url(_png(4000, 4000))}}
    error = _refusal(server, [large] * 3)
    assert "pixels in all" in error["message"]
    assert error["param"] == "messages[0].content[2].image_url.url"
    small = _content([(1, 60, 40)])
    assert "at most 32 images" in _refusal(server, small * 33)["message"]


def test_a_prompt_with_too_many_images_exceeds_the_context(server: ServedInThread) -> None:
    error = _refusal(server, _content([(1, 60, 40)]) * 32 + [{"type": "text", "text": "a" * 1500}])
    assert error["code"] == "context_length_exceeded"


def test_local_files_are_read_below_the_allowed_folder_only(
    server: ServedInThread, media: Path, tmp_path: Path
) -> None:
    expected = _ask(server, _content(CASES[0]))["choices"][0]["message"]["content"]
    (media / "a b.png").write_bytes(image_file(noise(1)))
    outside = tmp_path / "secret.png"
    outside.write_bytes(image_file(noise(1)))
    (media / "link.png").symlink_to(outside)
    (media / "inner.png").symlink_to(media / "a b.png")
    (media / "folder").symlink_to(tmp_path)

    def content(url: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]

    for url in (f"{media}/a b.png", f"file://{media}/a%20b.png", f"file://localhost{media}/inner.png"):
        assert _ask(server, content(url))["choices"][0]["message"]["content"] == expected
    for url in (
        str(outside),
        f"file://{outside}",
        f"{media}/../{tmp_path.name}/secret.png",
        f"file://{media}/%2e%2e/{tmp_path.name}/secret.png",
        f"{media}/link.png",
        f"{media}/folder/secret.png",
        f"{media}/folder/absent.png",
        f"{media}-other/a.png",
        "/etc/passwd",
        "/proc/self/root/etc/passwd",
    ):
        assert "not below --allowed-local-media-path" in _refusal(server, content(url))["message"], url
    for url, words in (
        (f"{media}/absent.png", "No such file"),
        (str(media), "Is a directory"),
        (f"file://host{media}/a.png", "names no other host"),
        (f"{media}/\0", "cannot be read"),
    ):
        assert words in _refusal(server, content(url))["message"]
