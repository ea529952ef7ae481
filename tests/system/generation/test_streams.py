from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.processes import OvmsProcess, serving
from tests.support.tiny_llm import write_tiny_folder
from tests.support.waits import until
from tests.support.worker_clients import sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SECONDS = 120


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OvmsProcess]:
    # Neither a cache of prefixes nor bfloat16: the choice of two tokens that are almost equally likely must not depend
    # on the other texts of the batch.
    options = ["--model_name", "chat", "--model_path", str(write_tiny_folder(tmp_path / "model"))]
    options += ["--task", "text_generation", "--enable_prefix_caching", "false", "--drain_seconds", str(SECONDS)]
    options += ["--plugin_config", '{"INFERENCE_PRECISION_HINT": "f32"}']
    with serving(*options, log=tmp_path / "log") as running:
        yield running


def _body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def _text(client: httpx.Client, tokens: int) -> str:
    answer = client.post("/v3/completions", json=_body("of the barn", tokens)).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def test_clients_that_leave_change_no_other_text(server: OvmsProcess) -> None:
    with httpx.Client(base_url=server.rest, timeout=SECONDS) as client, ThreadPoolExecutor(1) as pool:
        alone = _text(client, 400)
        other = pool.submit(_text, client, 400)
        for count in range(40):
            body = _body(f"number {count}", 1500, stream=True)
            with client.stream("POST", "/v3/completions", json=body) as answer:
                assert len(list(islice(answer.iter_lines(), count))) == count
        assert other.result() == alone
        until(lambda: sample(server, "ovmstrio_llm_requests_running") == 0)
        assert _text(client, 400) == alone


def test_drain_waits_for_streams(server: OvmsProcess) -> None:
    with httpx.Client(base_url=server.rest, timeout=SECONDS) as client, ThreadPoolExecutor(1) as pool:
        alone = _text(client, 1000)
        with client.stream("POST", "/v3/completions", json=_body("of the barn", 1000, stream=True)) as answer:
            lines = answer.iter_lines()
            events = [next(lines)]
            stopping = pool.submit(server.stop)
            events += lines
        assert stopping.result()[0] == 0
    assert events[-2:] == ["data: [DONE]", ""]
    documents = (json.loads(line.removeprefix("data: ")) for line in events if line.startswith("data: {"))
    assert "".join(choice["text"] for each in documents for choice in each["choices"]) == alone
