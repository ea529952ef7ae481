"""A graph with a model that makes text between Python nodes, called by OpenAI's own client."""

from __future__ import annotations

import json
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.graphs_of_texts import BEFORE_AND_BEHIND, SHOUTING
from tests.support.processes import OvmsProcess, run_ovms, serving
from tests.support.tiny_llm import write_tiny_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_GREEDY: Any = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one folder that is served as a graph of three nodes, and as the model alone."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_folder(folder / "llm")
    options = 'models_path: "./" cache_size: 1'
    (folder / "llm" / "graph.pbtxt").write_text(BEFORE_AND_BEHIND.replace('models_path: "./"', options))
    for name, source in SHOUTING.items():
        (folder / "llm" / f"{name}.py").write_text(dedent(source))
    lists: dict[str, Any] = {
        "model_config_list": [],
        "mediapipe_config_list": [{"name": "shouting", "base_path": "llm"}],
        "text_model_config_list": [{"config": {"name": "alone", "base_path": "llm", "cache_size": 0.1}}],
    }
    (folder / "config.json").write_text(json.dumps(lists))
    return folder / "config.json"


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def server(config: Path, request: pytest.FixtureRequest) -> Iterator[OvmsProcess]:
    """Serve both, by one process and by several, which share the engines."""
    more = [] if request.param == 1 else ["--workers", str(request.param)]
    with serving("--config_path", str(config), *more) as running:
        yield running


def _client(server: OvmsProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.rest}/v3", api_key="none", max_retries=0, timeout=120)


def _ask(client: openai.OpenAI, name: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Tell me"}]
    return client.chat.completions.create(model=name, messages=messages, **_GREEDY, **more)


def test_a_graph_answers_as_its_model_does_but_for_what_its_nodes_change(server: OvmsProcess) -> None:
    """Whole and as a stream, whichever process answers."""
    with _client(server) as client:
        expected = _ask(client, "alone").choices[0].message.content.upper()
        counts = []
        for _ in range(3):
            whole = _ask(client, "shouting")
            assert (whole.model, whole.choices[0].message.content) == ("shouting", expected)
            chunks = list(_ask(client, "shouting", stream=True))
            counts.append(len(chunks))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        # What comes while the machine is busy may come together.
        assert max(counts) > 3
        asked_more = _ask(client, "shouting", extra_headers={"x-words": "more"})
        assert asked_more.usage.prompt_tokens > whole.usage.prompt_tokens


def test_what_a_body_may_not_say_is_told_with_its_field(server: OvmsProcess) -> None:
    """As the model alone tells it, for streams, too."""
    with _client(server) as client:
        for is_stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                _ask(client, "shouting", stream=is_stream, top_p=7)
            assert caught.value.param == "top_p"


def test_a_check_loads_the_graph_with_its_model(config: Path) -> None:
    """And closes both."""
    done = run_ovms("check", str(config), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 versions loaded" in done.stdout
