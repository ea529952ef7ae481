"""Models of text as they are configured, served by the real command, and talked to by `ovms chat`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import OvmsProcess, run_ovms, serving
from tests.support.tiny_llm import write_tiny_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_GRAPH = """
input_stream: "HTTP_REQUEST_PAYLOAD:input"
output_stream: "HTTP_RESPONSE_PAYLOAD:output"
node: {
  name: "LLMExecutor"
  calculator: "HttpLLMCalculator"
  input_stream: "LOOPBACK:loopback"
  input_stream: "HTTP_REQUEST_PAYLOAD:input"
  input_side_packet: "LLM_NODE_RESOURCES:llm"
  output_stream: "LOOPBACK:loopback"
  output_stream: "HTTP_RESPONSE_PAYLOAD:output"
  input_stream_info: { tag_index: 'LOOPBACK:0', back_edge: true }
  node_options: {
    [type.googleapis.com / mediapipe.LLMCalculatorOptions]: {
      models_path: "./",
      cache_size: 1,
      max_tokens_limit: 12,
    }
  }
  input_stream_handler {
    input_stream_handler: "SyncSetInputStreamHandler",
    options {
      [mediapipe.SyncSetInputStreamHandlerOptions.ext] { sync_set { tag_index: "LOOPBACK:0" } }
    }
  }
}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one folder that is served three times: as OVMS's graph, as its folder holds it, and by an entry of ours."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_folder(folder / "llm")
    (folder / "llm" / "graph.pbtxt").write_text(_GRAPH)
    lists: dict[str, Any] = {
        "model_config_list": [{"config": {"name": "in_models", "base_path": "llm"}}],
        "mediapipe_config_list": [{"name": "graph", "base_path": "llm"}],
        "text_model_config_list": [{"config": {"name": "entry", "base_path": "llm", "cache_size": 0.1}}],
    }
    (folder / "config.json").write_text(json.dumps(lists))
    return folder / "config.json"


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[OvmsProcess]:
    """Serve them."""
    with serving("--config_path", str(config)) as running:
        yield running


def _ask(server: OvmsProcess, name: str, *options: str) -> dict[str, Any]:
    said = ("--once", "Tell me", "--temperature", "0", "--json", *options)
    done = run_ovms("chat", name, "--url", server.rest, *said, timeout=120)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_a_graph_of_ovms_and_an_entry_of_ours_answer_alike(server: OvmsProcess) -> None:
    """The weights are the same, and so is the likeliest text; each has its own bound of tokens."""
    entry = _ask(server, "entry", "--max_tokens", "8")
    assert (entry["finish_reason"], entry["completion_tokens"]) == ("length", 8)
    assert entry["text"]
    for name in ("graph", "in_models"):
        assert _ask(server, name, "--max_tokens", "8")["text"] == entry["text"]
        assert _ask(server, name)["completion_tokens"] == 12


def test_what_a_graph_does_not_allow_is_told_by_the_chat(server: OvmsProcess) -> None:
    """The bound of the graph's file holds."""
    done = run_ovms("chat", "graph", "--url", server.rest, "--once", "Hi", "--max_tokens", "13", timeout=120)
    assert done.returncode == 1
    assert "max_tokens" in done.stderr


def test_they_are_listed_as_what_takes_no_tensors(server: OvmsProcess) -> None:
    """Beside their states."""
    done = run_ovms("models", "--url", server.grpc, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no tensors") == 3
    assert done.stdout.count("READY") == 3


def test_a_check_loads_them(config: Path) -> None:
    """And closes them again."""
    done = run_ovms("check", str(config), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 versions loaded" in done.stdout
