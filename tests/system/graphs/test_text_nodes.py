from __future__ import annotations

import json
import math
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import trio
import trio.testing

from ovmstrio.core.errors import (
    ConfigError,
    GraphFailure,
    InvalidField,
    ModelFailure,
    NotSupported,
    Problem,
    TooManyRequests,
)
from ovmstrio.core.generation import Conversation, Finish, GenerationChunk
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.graphs.validate import validate_graph
from ovmstrio.isolation.isolated_code import Isolation
from tests.support.graphs import (
    BEFORE_AND_BEHIND,
    INPUTS,
    LOOPBACK,
    OUTPUTS,
    SHOUTING,
    graph_text,
    handler,
    loaded,
    python_node,
    text_node,
)
from tests.support.scripted_services import ScriptedGenerator

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.graphs.servable import GraphServable

CHAT = "/v3/chat/completions"


class Loader:
    def __init__(self, **settings: Any) -> None:
        self.made = ScriptedGenerator(**settings)
        self.specs: list[TextModelSpec] = []

    async def __call__(self, spec: TextModelSpec) -> ScriptedGenerator:
        self.specs.append(spec)
        await trio.lowlevel.checkpoint()
        return self.made


def _request(path: str = CHAT, *, words: str = "", **body: Any) -> HttpRequest:
    headers = (("content-type", "application/json"), ("x-words", words))
    document = {"model": "graph", **({} if "prompt" in body or "input" in body else _MESSAGES), **body}
    return HttpRequest("POST", path, headers=headers, body=json.dumps(document).encode(), target=path)


_MESSAGES = {"messages": [{"role": "user", "content": "one two"}]}


async def _documents(graph: GraphServable, request: HttpRequest) -> list[Any]:
    found = []
    with trio.fail_after(60):
        async with graph.open_payload(request, math.inf) as documents:
            while (document := await documents.receive()) is not None:
                assert document.media_type == "application/json"
                found.append(json.loads(document.data))
    return found


def _shouting(folder: Path, loader: Loader, **handlers: str) -> AbstractAsyncContextManager[GraphServable]:
    return loaded(folder / "g", BEFORE_AND_BEHIND, load_text=loader, **{**SHOUTING, **handlers})


@pytest.mark.parametrize("isolation", [None, Isolation()], ids=["threads", "processes"])
async def test_python_nodes_change_request_and_response(tmp_path: Path, isolation: Isolation | None) -> None:
    loader = Loader()
    async with loaded(tmp_path / "g", BEFORE_AND_BEHIND, load_text=loader, isolation=isolation, **SHOUTING) as graph:
        (document,) = await _documents(graph, _request(words=" three"))
    (request,) = loader.made.requests
    assert isinstance(request.prompt, Conversation)
    assert [message["content"] for message in request.prompt.messages] == ["one two three"]
    assert document["object"] == "chat.completion"
    assert document["model"] == "graph"
    assert document["choices"][0]["message"]["content"] == "ONE TWO THREE"
    assert document["usage"]["completion_tokens"] == 3
    assert [spec.name for spec in loader.specs] == ["graph.LLMExecutor"]
    assert loader.specs[0].path == tmp_path / "g"


async def test_each_piece_of_a_stream_passes_the_nodes(tmp_path: Path) -> None:
    ready = trio.Event()
    script = [GenerationChunk(text="one", tokens=1), ready, GenerationChunk(text=" two", tokens=1, finish=Finish.STOP)]
    loader = Loader(script=lambda _: script)
    found = []
    async with _shouting(tmp_path, loader) as graph, graph.open_payload(_request(stream=True), math.inf) as documents:
        with trio.fail_after(60):
            while (document := await documents.receive()) is not None:
                found.append(json.loads(document.data)["choices"][0])
                if found[-1]["delta"]["content"] == "ONE":
                    await loader.made.waiting.wait()
                    assert loader.made.running == 1
                    ready.set()
    assert "".join(each["delta"]["content"] for each in found) == "ONE TWO"
    assert found[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v3/completions", {"prompt": "one two"}, "text_completion"),
        ("/v1/responses", {"input": "one two"}, "response"),
        ("/v3/v1/chat/completions", {}, "chat.completion"),
    ],
)
async def test_each_path_has_its_response(tmp_path: Path, path: str, body: dict[str, Any], kind: str) -> None:
    loader = Loader()
    async with _shouting(tmp_path, loader) as graph:
        (document,) = await _documents(graph, _request(path, **body))
    assert document["object"] == kind
    assert len(loader.made.requests) == 1


@pytest.mark.parametrize("is_stream", [False, True], ids=["document", "stream"])
async def test_disconnected_client_ends_the_text(tmp_path: Path, *, is_stream: bool) -> None:
    script = [GenerationChunk(text="one", tokens=1), trio.Event()]
    loader = Loader(script=lambda _: script)
    async with _shouting(tmp_path, loader) as graph:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_documents, graph, _request(stream=is_stream))
                await loader.made.waiting.wait()
                nursery.cancel_scope.cancel()
        assert loader.made.running == 0
    assert loader.made.left.is_set()


async def test_invalid_body_of_a_node_is_refused(tmp_path: Path) -> None:
    spoiling = handler("return {**inputs[0].json, 'temperature': inputs[0].json['user'] == 'a' and 7}")
    async with _shouting(tmp_path, Loader(), before=spoiling) as graph:
        with pytest.raises(InvalidField, match="temperature out of range") as caught:
            await _documents(graph, _request(user="a"))
        assert caught.value.field == "temperature"
        with pytest.raises(NotSupported, match=r"/chat/completions, .*, /api/generate\), got /v3/x"):
            await _documents(graph, _request("/v3/x", user="b"))


async def test_failures_of_the_model_name_its_node_and_refusals_do_not(tmp_path: Path) -> None:
    script = [GenerationChunk(text="one", tokens=1), ModelFailure("the engine has ended")]
    async with _shouting(tmp_path, Loader(script=lambda _: script)) as graph:
        for is_stream in (False, True):
            with pytest.raises(GraphFailure, match='node "LLMExecutor" failed: the engine has ended'):
                await _documents(graph, _request(stream=is_stream))
    async with _shouting(tmp_path, Loader(refusal=TooManyRequests("full"))) as graph:
        with pytest.raises(TooManyRequests, match="full"):
            await _documents(graph, _request())


async def test_failed_node_ends_the_text(tmp_path: Path) -> None:
    failing = handler("return {'a': 1 / (b'two' not in bytes(inputs[0]))}")
    script = [GenerationChunk(text="one", tokens=1), GenerationChunk(text="two", tokens=1), trio.Event()]
    loader = Loader(script=lambda _: script)
    async with _shouting(tmp_path, loader, behind=failing) as graph:
        with pytest.raises(GraphFailure, match=r"ZeroDivisionError: division by zero \(.*behind.py:5\)"):
            await _documents(graph, _request(stream=True))
        assert loader.made.running == 0


async def test_failed_load_of_a_model_names_node_and_line(tmp_path: Path) -> None:

    async def refuse(spec: TextModelSpec) -> NoReturn:
        await trio.lowlevel.checkpoint()
        raise ConfigError([Problem("there is no model", path="path", found=str(spec.path))])

    text = BEFORE_AND_BEHIND.replace("./", "nowhere")
    with pytest.RaisesGroup(ConfigError, flatten_subgroups=True) as caught:
        async with loaded(tmp_path / "g", text, load_text=refuse, **SHOUTING):
            pytest.fail("it was loaded")
    failure = caught.value.exceptions[0]
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    assert isinstance(failure, ConfigError)
    (problem,) = failure.problems
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "models_path" in each)
    assert (problem.line, problem.path) == (line, 'node "LLMExecutor"')
    assert problem.found == str(tmp_path / "g" / "nowhere")


async def test_second_document_of_one_request_is_refused(tmp_path: Path) -> None:
    before = python_node("before.py", INPUTS, ["HTTP_REQUEST_PAYLOAD:changed"], name="before", more=LOOPBACK)
    loop = LOOPBACK.replace("LOOPBACK:loopback", "LOOPBACK:again")
    text = graph_text(before, text_node(outputs=OUTPUTS, more=loop), inputs=INPUTS, outputs=OUTPUTS)
    twice = handler("yield inputs[0].json\nyield inputs[0].json")
    script = repeat(GenerationChunk(text="one", tokens=1))
    async with loaded(tmp_path / "g", text, load_text=Loader(script=lambda _: script), before=twice) as graph:
        with pytest.raises(GraphFailure, match=r"RESOURCE_EXHAUSTED[^$]*it accepts one document per request"):
            await _documents(graph, _request(stream=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BEFORE_AND_BEHIND.replace("HTTP_REQUEST_PAYLOAD:asked", "OVMS_PY_TENSOR:asked").replace(
            "HTTP_RESPONSE_PAYLOAD:answer", "OVMS_PY_TENSOR:answer"), "needs a graph for raw HTTP requests"),
        (BEFORE_AND_BEHIND.replace(text_node(), text_node(more="")), "streams its response, and has no LOOPBACK"),
        (BEFORE_AND_BEHIND.replace('path: "./"', 'path: "./" max_num_seqs: 0'), "the value cannot be used"),
        (BEFORE_AND_BEHIND.replace('path: "./"', 'path: "./" draft_cache_size: 1'), "draft model"),
    ],
    ids=["tensors", "no loop", "value", "option"],
)  # fmt: skip
def test_invalid_text_node_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    for name in ("before", "behind"):
        (tmp_path / f"{name}.py").write_text(
            "class OvmsPythonModel:\n    def execute(self, inputs):\n        return []\n"
        )
    path = tmp_path / "graph.pbtxt"
    path.write_text(text)
    (problem,) = validate_graph(path).errors
    assert words in problem.message
    first = next(number for number, line in enumerate(text.splitlines(), 1) if "HttpLLMCalculator" in line)
    assert problem.line is not None
    assert first - 2 <= problem.line <= first + 20
