from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.graphs import LOOPBACK, graph_text, python_node
from tests.support.served_in_thread import PATIENCE_SECONDS, ServedInThread, serving_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPEAKER = """
from pyovms import Tensor, current_context

class OvmsPythonModel:
    def execute(self, inputs):
        text = bytes(inputs[0]).decode()
        limit = current_context().parameters.get("max_new_tokens", 3)
        if text == "raise":
            yield [Tensor("text", b"so far")]
            raise ValueError("no further")
        if text == "raise at once":
            raise ValueError("not at all")
        for number in range(limit):
            yield [Tensor("text", f"{text} {number + 1}. ".encode())]
        yield [Tensor("end", b"")]
"""

ANSWERER = """
class OvmsPythonModel:
    def execute(self, inputs):
        request, = inputs
        if request.json is None:
            yield request.uri
        elif request.json.get("fail") == "late":
            yield {"so": "far"}
            raise ValueError("no further")
        elif request.json.get("fail"):
            raise ValueError("not at all")
        else:
            yield []
            for number in range(request.json.get("count", 1)):
                yield {"number": number, "path": request.uri}
            if request.json.get("stream"):
                yield b"data: [DONE]\\n\\n" if request.json.get("writes") else "[DONE]"
"""

TEXTS = {"inputs": ["OVMS_PY_TENSOR:prompt"], "outputs": ["OVMS_PY_TENSOR:text", "OVMS_PY_TENSOR_END:end"]}
PAYLOADS = {"inputs": ["HTTP_REQUEST_PAYLOAD:request"], "outputs": ["HTTP_RESPONSE_PAYLOAD:answer"]}


def _write(folder: Path, name: str, source: str, node: str, streams: dict[str, Any]) -> dict[str, Any]:
    (folder / name).mkdir()
    (folder / name / "handler.py").write_text(source)
    (folder / name / "graph.pbtxt").write_text(graph_text(node, **streams))
    return {"name": name, "base_path": str(folder / name)}


@pytest.fixture(scope="module", params=["none", "process"])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ServedInThread]:
    folder = tmp_path_factory.mktemp("chats")
    speaker = python_node("handler.py", ["IN:prompt"], ["TEXT:text", "END:end"], more=LOOPBACK)
    answers = python_node("handler.py", PAYLOADS["inputs"], PAYLOADS["outputs"], more=LOOPBACK)
    graphs = [
        _write(folder, "speaker", SPEAKER, speaker, TEXTS),
        _write(folder, "answers", ANSWERER, answers, PAYLOADS),
        _write(folder, "plain", SPEAKER, python_node("handler.py", ["IN:prompt"], ["TEXT:text", "END:end"]), TEXTS),
    ]
    config = folder / "config.json"
    entries = [{**graph, "python_isolation": request.param} for graph in graphs]
    config.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": entries}))
    with serving_in_thread(config_path=config) as server:
        yield server


def _client(server: ServedInThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v3", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)


def _ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return client.chat.completions.create(model="speaker", messages=messages, **more)


def test_payload_graph_answers_chats(served: ServedInThread) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with _client(served) as client:
        raw = client.chat.completions.with_raw_response
        answered = raw.create(model="answers", messages=messages)
        assert json.loads(answered.text) == {"number": 0, "path": "/v3/chat/completions"}
        for more in (
            {"extra_body": {"stream": True}},
            {"extra_body": {"stream": True, "writes": True}},
            {"extra_headers": {"accept": "text/event-stream"}},
        ):
            streamed = raw.create(model="answers", messages=messages, **more)
            lines = [line for line in streamed.text.splitlines() if line]
            assert lines == ['data: {"number": 0, "path": "/v3/chat/completions"}', "data: [DONE]"]


def test_text_graph_answers_chats_and_completions(served: ServedInThread) -> None:
    with _client(served) as client:
        complete = _ask(client, "hello")
        chunks = list(_ask(client, "hello", stream=True, stream_options={"include_usage": True}))
        plain = client.completions.create(model="speaker", prompt="as it is", max_tokens=2)
    assert complete.choices[0].message.content == "hello 1. hello 2. hello 3. "
    assert (complete.choices[0].finish_reason, complete.usage.completion_tokens) == ("stop", 3)
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == complete.choices[0].message.content
    assert [each.choices[0].finish_reason for each in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1].usage.completion_tokens == 3
    assert plain.choices[0].text == "as it is 1. as it is 2. "
    assert plain.choices[0].finish_reason == "length"


def test_errors_have_the_form_of_openai(served: ServedInThread) -> None:
    with _client(served) as client:
        with pytest.raises(openai.BadRequestError, match=r"ValueError: not at all .*handler.py:12"):
            _ask(client, "raise at once")
        with pytest.raises(openai.BadRequestError, match="not at all"):
            _ask(client, "raise at once", stream=True)
        chunks = iter(_ask(client, "raise", stream=True))
        first = [next(chunks).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError, match=r"ValueError: no further .*handler.py:10"):
            list(chunks)
    assert first == ["", "so far"]


def test_graph_without_text_is_refused(served: ServedInThread) -> None:
    with _client(served) as client:
        for is_stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="or name the streams in the graph file") as caught:
                client.chat.completions.create(
                    model="plain", messages=[{"role": "user", "content": "x"}], stream=is_stream
                )
            assert caught.value.code == "unsupported"
        assert [each.id for each in client.models.list()] == ["speaker", "answers", "plain"]


def test_concurrent_clients_get_their_own_texts(served: ServedInThread) -> None:
    started = threading.Barrier(8, timeout=PATIENCE_SECONDS)

    def talk(number: int) -> str:
        with _client(served) as client:
            started.wait()
            if number % 2:
                chunks = _ask(client, f"n{number}", stream=True, max_tokens=200)
                return "".join(each.choices[0].delta.content or "" for each in chunks)
            return str(_ask(client, f"n{number}", max_tokens=200).choices[0].message.content)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(talk, range(8)))
    assert texts == ["".join(f"n{number} {count}. " for count in range(1, 201)) for number in range(8)]


# Paths that no API has


def test_payload_graph_answers_other_paths(served: ServedInThread) -> None:
    named = served.ask("POST", "/v3/summaries/long?x=1", json={"model": "answers"})
    several = served.ask("POST", "/v3/v1/summaries", json={"model": "answers", "count": 2})
    by_path = served.ask("GET", "/v3/answers/more?y=2")
    nothing = served.ask("POST", "/v3/summaries", json={"model": "answers", "count": 0})
    assert (named.status_code, named.json()) == (200, {"number": 0, "path": "/v3/summaries/long?x=1"})
    assert named.headers["content-type"] == "application/json"
    assert [each["number"] for each in several.json()] == [0, 1]
    assert (by_path.text, by_path.headers["content-type"]) == ("/v3/answers/more?y=2", "text/plain; charset=utf-8")
    assert (nothing.status_code, nothing.content) == (204, b"")


@pytest.mark.parametrize("by", ["body", "header"])
def test_answers_are_events_on_request(served: ServedInThread, by: str) -> None:
    body = {"model": "answers", "count": 2, "stream": True} if by == "body" else {"model": "answers", "count": 2}
    headers = {} if by == "body" else {"Accept": "text/event-stream"}
    answer = served.ask("POST", "/v3/any", json=body, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert [json.loads(event)["number"] for event in events[:2]] == [0, 1]
    assert events[2:] == (["[DONE]"] if by == "body" else [])


def test_errors_of_other_paths_have_the_form_of_openai(served: ServedInThread) -> None:
    at_once = served.ask("POST", "/v3/any", json={"model": "answers", "fail": True, "stream": True})
    late = served.ask("POST", "/v3/any", json={"model": "answers", "fail": "late", "stream": True})
    late_answer = served.ask("POST", "/v3/any", json={"model": "answers", "fail": "late"})
    assert (at_once.status_code, late.status_code, late_answer.status_code) == (400, 200, 400)
    assert "ValueError: not at all" in at_once.json()["error"]["message"]
    first, last = (json.loads(line.removeprefix("data: ")) for line in late.text.split("\n\n") if line)
    assert first == {"so": "far"}
    assert "ValueError: no further" in last["error"]["message"]
    assert "ValueError: no further" in late_answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v3/nowhere", {"model": "speaker"}, 404),
        ("/v3/nowhere", {"model": "nobody"}, 404),
        ("/v3/nowhere", {"model": ["answers"]}, 404),
        ("/v3/speaker", {}, 404),
        ("/v3/models", {"model": "answers"}, 405),
        ("/v1/anything", {"model": "answers"}, 404),
    ],
)
def test_paths_without_such_a_graph_are_refused(
    served: ServedInThread, path: str, body: dict[str, Any], status: int
) -> None:
    assert served.ask("POST", path, json=body).status_code == status
