"""``ovms serve --workers``: a model of text has one engine, which all workers ask."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import OvmsProcess, serving
from tests.support.tiny_llm import write_tiny_folder

pytestmark = pytest.mark.e2e

SECONDS = 60
NAME = "tiny"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configure one model."""
    folder = tmp_path_factory.mktemp("texts")
    write_tiny_folder(folder / "llm")
    entry = {"config": {"name": NAME, "base_path": "llm", "cache_size": 0.1}}
    (folder / "config.json").write_text(json.dumps({"model_config_list": [], "text_model_config_list": [entry]}))
    return folder / "config.json"


@contextmanager
def _serving(config: Path, log: Path, *options: str) -> Iterator[OvmsProcess]:
    with serving("--config_path", str(config), "--workers", "2", *options, log=log) as server:
        _until(lambda: server.get("/v2/health/ready").status_code == 200)
        yield server


def _until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < ends
        threading.Event().wait(0.02)


@contextmanager
def _two_workers(server: OvmsProcess) -> Iterator[list[httpx.Client]]:
    """Give a client of each worker."""
    with (
        httpx.Client(base_url=server.rest, timeout=SECONDS) as one,
        httpx.Client(base_url=server.rest, timeout=SECONDS) as other,
    ):
        for client in (one, other):
            client.get("/v2/health/live").raise_for_status()
        yield [one, other]


def _asked(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me"}]
    return {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 8, **more}


def _text(client: httpx.Client, **more: Any) -> tuple[str, int]:
    answer = client.post("/v3/chat/completions", json=_asked(**more)).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


def _engines(server: OvmsProcess) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(server.process.pid).children(recursive=True):
        # One may end while it is looked at.
        with suppress(psutil.NoSuchProcess):
            command = " ".join(each.cmdline())
            # Each engine has a process that renders its chat template.
            if "ovmstrio.openvino.engine" in command and "template_program" not in command:
                found.append(each)
    return found


def _sample(server: OvmsProcess, name: str) -> float:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_all_workers_ask_one_engine_and_answer_alike(config: Path, tmp_path: Path) -> None:
    """Whole answers and streams, several texts and errors; figures of the engine are told once, tokens of all."""
    with _serving(config, tmp_path / "log") as server, _two_workers(server) as clients:
        assert len(_engines(server)) == 1
        texts = {_text(client) for client in clients}
        assert len(texts) == 1
        ((text, tokens),) = texts
        assert tokens == 8
        for client in clients:
            streamed = ""
            with client.stream("POST", "/v3/chat/completions", json=_asked(stream=True)) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        streamed += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            assert streamed == text
            several = client.post("/v3/chat/completions", json=_asked(n=2)).json()
            assert [choice["message"]["content"] for choice in several["choices"]] == [text, text]
            long = [{"role": "user", "content": "x" * 10_000}]
            refused = client.post("/v3/chat/completions", json=_asked(messages=long))
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert _sample(server, "ovmstrio_llm_generation_tokens_total") == 2 * (8 + 8 + 16)
        cache = _sample(server, "ovmstrio_llm_kv_cache_bytes")
        assert 0 < cache <= 2**30 / 10 + 1


@pytest.mark.slow
def test_a_client_that_leaves_ends_its_request_whichever_worker_it_asked(config: Path, tmp_path: Path) -> None:
    """The engine has nothing to do soon, though thousands of tokens were asked for."""
    with _serving(config, tmp_path / "log") as server:
        with _two_workers(server) as clients:
            for client in clients:
                asked = _asked(stream=True, max_tokens=1900, ignore_eos=True)
                with client.stream("POST", "/v3/chat/completions", json=asked) as answer:
                    assert next(answer.iter_lines()).startswith("data: {")
        _until(lambda: _sample(server, "ovmstrio_llm_requests_running") == 0)
        assert _sample(server, "ovmstrio_llm_generation_tokens_total") < 2 * 1900


@pytest.mark.slow
def test_another_engine_takes_over_where_one_has_ended_or_its_worker_has(config: Path, tmp_path: Path) -> None:
    """Requests under way fail then, and the next are answered by all workers."""
    with _serving(config, tmp_path / "log") as server:
        with _two_workers(server) as clients:
            (engine,) = _engines(server)
            asked = _asked(stream=True, max_tokens=1900, ignore_eos=True)
            for client in clients:
                with client.stream("POST", "/v3/chat/completions", json=asked) as answer:
                    lines = answer.iter_lines()
                    assert next(lines).startswith("data: {")
                    if engine.is_running():
                        engine.kill()
                    assert any("error" in line for line in lines)
                _until(lambda: bool(_engines(server)) and server.get("/v2/health/ready").status_code == 200)
                (engine,) = _engines(server)
            assert len({_text(client) for client in clients}) == 1
        (engine,) = _engines(server)
        owner = engine.parent()
        assert owner is not None
        owner.kill()
        _until(lambda: len(_engines(server)) == 1 and server.get("/v2/health/ready").status_code == 200)
        with _two_workers(server) as clients:
            assert len({_text(client) for client in clients}) == 1


@pytest.mark.slow
def test_a_reload_has_one_engine_take_the_place_of_another_whichever_worker_is_asked(
    config: Path, tmp_path: Path
) -> None:
    """The worker that has the engine, or the other one, which needs it to be loaded there before it is done."""
    file = tmp_path / "config.json"
    document = json.loads(config.read_text())
    entry = document["text_model_config_list"][0]["config"]
    entry["base_path"] = str(config.parent / entry["base_path"])
    file.write_text(json.dumps(document))
    with (
        _serving(file, tmp_path / "log", "--file_system_poll_wait_seconds", "0") as server,
        _two_workers(server) as clients,
    ):
        for number, asked in enumerate(clients):
            entry["max_num_seqs"] = 10 + number
            file.write_text(json.dumps(document))
            (before,) = _engines(server)
            assert asked.post("/v1/config/reload").status_code == 201
            assert len({_text(client) for client in clients}) == 1
            _until(lambda before=before: before not in _engines(server))  # type: ignore[misc]  # the loop's own
            assert len(_engines(server)) == 1
