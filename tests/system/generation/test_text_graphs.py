from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.processes import OvmsProcess, run_ovms

if TYPE_CHECKING:
    from tests.support.system_servers import SystemServers

pytestmark = pytest.mark.slow

GREEDY: Any = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
def server(servers: SystemServers) -> OvmsProcess:
    return servers.serving("text_graphs")


@pytest.fixture(params=["text_graphs", "text_graph_workers"], ids=["one process", "two workers"])
def client(servers: SystemServers, request: pytest.FixtureRequest) -> openai.OpenAI:
    url = f"{servers.serving(request.param).rest}/v3"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def _chat(server: OvmsProcess, name: str, *options: str) -> dict[str, Any]:
    prompt = ("--once", "Tell me", "--temperature", "0", "--json", *options)
    done = run_ovms("chat", name, "--url", server.rest, *prompt, timeout=120)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_graph_of_ovms_and_entry_have_the_same_text(server: OvmsProcess) -> None:
    entry = _chat(server, "alone", "--max_tokens", "8")
    assert (entry["finish_reason"], entry["completion_tokens"]) == ("length", 8)
    assert entry["text"]
    for name in ("graph", "in_models"):
        assert _chat(server, name, "--max_tokens", "8")["text"] == entry["text"]
        assert _chat(server, name)["completion_tokens"] == 12
    refused = run_ovms("chat", "graph", "--url", server.rest, "--once", "Hi", "--max_tokens", "13", timeout=120)
    assert refused.returncode == 1
    assert "max_tokens" in refused.stderr


def test_language_models_are_listed_without_tensors(server: OvmsProcess) -> None:
    done = run_ovms("models", "--url", server.grpc, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no tensors") == 3
    assert done.stdout.count("READY") == 4


def test_check_loads_all_language_models(server: OvmsProcess, servers: SystemServers) -> None:
    done = run_ovms("check", str(servers.folder("text_graphs") / "config.json"), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 versions loaded" in done.stdout


def _complete(client: openai.OpenAI, name: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Tell me"}]
    return client.chat.completions.create(model=name, messages=messages, **GREEDY, **more)


def test_python_nodes_change_requests_and_answers_of_a_model(client: openai.OpenAI) -> None:
    with client:
        expected = _complete(client, "alone").choices[0].message.content.upper()
        for _ in range(3):
            whole = _complete(client, "shouting")
            assert (whole.model, whole.choices[0].message.content) == ("shouting", expected)
            chunks = list(_complete(client, "shouting", stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        longer = _complete(client, "shouting", extra_headers={"x-words": "more"})
        assert longer.usage.prompt_tokens > whole.usage.prompt_tokens
        for is_stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                _complete(client, "shouting", stream=is_stream, top_p=7)
            assert caught.value.param == "top_p"
