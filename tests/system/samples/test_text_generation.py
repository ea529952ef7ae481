from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import ovmstrio.samples.text_generation
from ovmstrio.samples.catalog import BY_NAME
from ovmstrio.samples.text_generation.client import completions
from tests.support.processes import OvmsProcess, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    pytest.importorskip("openvino_genai")
    from tests.support.tiny_llm import write_tiny_folder

    folder = tmp_path_factory.mktemp("sample") / "text_generation"
    folder.mkdir()
    source = Path(ovmstrio.samples.text_generation.__file__).parent
    for name in ("graph.pbtxt", "generator.py"):
        shutil.copyfile(source / name, folder / name)
    write_tiny_folder(folder / "model")
    options = BY_NAME["text_generation"].options
    with serving("--model_name", "text_generation", "--model_path", str(folder), *options) as process:
        yield process


def _client(server: OvmsProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.rest}/v3", api_key="none", max_retries=0, timeout=60)


def _ask(client: openai.OpenAI, question: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="text_generation", messages=messages, **more)


def test_the_client_of_the_sample_and_openai_get_the_same_text(server: OvmsProcess) -> None:
    by_tensors = "".join(completions(server.grpc, "one two", 24))
    with _client(server) as client:
        whole = _ask(client, "one two", max_tokens=24)
        chunks = list(_ask(client, "one two", max_tokens=24, stream=True))
    assert len(by_tensors) > 3
    assert whole.choices[0].message.content == by_tensors
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == by_tensors


def test_abandoned_streams_do_not_change_other_answers(server: OvmsProcess) -> None:
    with _client(server) as client:
        alone = _ask(client, "one two three", max_tokens=40).choices[0].message.content
        left = [_ask(client, "on and on", max_tokens=1024, stream=True) for _ in range(4)]
        for stream in left:
            next(iter(stream))
        concurrent = _ask(client, "one two three", max_tokens=40).choices[0].message.content
        for stream in left:
            stream.close()
        again = _ask(client, "one two three", max_tokens=40).choices[0].message.content
    assert concurrent == again == alone


def test_a_refused_request_is_an_openai_error(server: OvmsProcess) -> None:
    with _client(server) as client, pytest.raises(openai.BadRequestError, match=r"from 1 to 1024, .*generator.py:"):
        _ask(client, "x", max_tokens=5000)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists the libraries of a process")
def test_the_engine_runs_in_a_separate_process(server: OvmsProcess) -> None:
    assert BY_NAME["text_generation"].config() == {
        "mediapipe_config_list": [
            {"name": "text_generation", "base_path": "text_generation", "python_isolation": "process"}
        ]
    }
    assert "libopenvino_genai" not in Path(f"/proc/{server.process.pid}/maps").read_text()
