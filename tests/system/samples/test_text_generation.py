"""The sample that makes text in a Python node, with a model of a fraction of a second in the place of its own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

import ovmstrio_samples.text_generation
from ovmstrio_samples.catalog import BY_NAME
from ovmstrio_samples.text_generation.client import completions
from tests.support.processes import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.processes import OvmsProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """Serve it as ``ovms prepare`` says."""
    pytest.importorskip("openvino_genai")
    from tests.support.tiny_llm import write_tiny_folder

    folder = tmp_path_factory.mktemp("sample") / "text_generation"
    folder.mkdir()
    source = Path(ovmstrio_samples.text_generation.__file__).parent
    for name in ("graph.pbtxt", "generator.py"):
        shutil.copyfile(source / name, folder / name)
    write_tiny_folder(folder / "model")
    options = BY_NAME["text_generation"].options
    with serving("--model_name", "text_generation", "--model_path", str(folder), *options) as process:
        yield process


def _client(server: OvmsProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.rest}/v3", api_key="none", max_retries=0, timeout=60)


def _ask(client: openai.OpenAI, said: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": said}]
    return client.chat.completions.create(model="text_generation", messages=messages, **more)


def test_its_own_client_and_openais_get_the_same_text(server: OvmsProcess) -> None:
    """Nothing of the sample was written for the latter."""
    by_tensors = "".join(completions(server.grpc, "one two", 24))
    with _client(server) as client:
        whole = _ask(client, "one two", max_tokens=24)
        chunks = list(_ask(client, "one two", max_tokens=24, stream=True))
    assert len(by_tensors) > 3
    assert whole.choices[0].message.content == by_tensors
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == by_tensors


def test_streams_that_are_left_leave_the_batch_to_others(server: OvmsProcess) -> None:
    """A whole answer comes out as if it had been alone."""
    with _client(server) as client:
        alone = _ask(client, "one two three", max_tokens=40).choices[0].message.content
        left = [_ask(client, "on and on", max_tokens=1024, stream=True) for _ in range(4)]
        for stream in left:
            next(iter(stream))
        beside = _ask(client, "one two three", max_tokens=40).choices[0].message.content
        for stream in left:
            stream.close()
        again = _ask(client, "one two three", max_tokens=40).choices[0].message.content
    assert beside == again == alone


def test_what_it_does_not_take_is_an_error_of_openais_form(server: OvmsProcess) -> None:
    """With the line of the sample's own file."""
    with _client(server) as client, pytest.raises(openai.BadRequestError, match=r"from 1 to 1024, .*generator.py:"):
        _ask(client, "x", max_tokens=5000)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells what a process has loaded")
def test_the_engine_is_not_in_the_servers_process(server: OvmsProcess) -> None:
    """Its steps hold the interpreter's lock."""
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libopenvino_genai" not in maps
    assert os.getpid() != server.process.pid


def test_its_configuration_has_the_process_too() -> None:
    """Whichever way it is served."""
    assert json.loads(json.dumps(BY_NAME["text_generation"].config())) == {
        "mediapipe_config_list": [
            {"name": "text_generation", "base_path": "text_generation", "python_isolation": "process"}
        ]
    }
