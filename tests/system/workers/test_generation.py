from __future__ import annotations

import json
import signal
import threading
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.support.processes import OvmsProcess, serving
from tests.support.system_servers import write_config
from tests.support.tiny_llm import write_tiny_folder
from tests.support.waits import WAIT_SECONDS, until
from tests.support.worker_clients import each_worker, sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.system_servers import SystemServers

LONG: dict[str, Any] = {"stream": True, "max_tokens": 1900, "ignore_eos": True}


def _body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me"}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8, **more}


def _text(client: httpx.Client, **more: Any) -> tuple[str, int]:
    answer = client.post("/v3/chat/completions", json=_body(**more)).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


def _engines(server: OvmsProcess) -> list[psutil.Process]:
    # Each engine has a process that renders its chat template.
    templates = server.descendants("template_program")
    return [each for each in server.descendants("ovmstrio.inference.engine") if each not in templates]


def _one_engine(server: OvmsProcess) -> psutil.Process:
    """Return the engine once the server is ready with one."""
    until(lambda: len(_engines(server)) == 1 and server.answers("/v2/health/ready"))
    return _engines(server)[0]


def test_all_workers_use_one_engine_and_answer_alike(servers: SystemServers) -> None:
    server = servers.serving("generation_workers")
    before = sample(server, "ovmstrio_llm_generation_tokens_total")
    with each_worker(server) as clients:
        _one_engine(server)
        ((text, tokens),) = {_text(client) for client in clients}
        assert tokens == 8
        for client in clients:
            streamed = ""
            with client.stream("POST", "/v3/chat/completions", json=_body(stream=True)) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        streamed += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            assert streamed == text
            several = client.post("/v3/chat/completions", json=_body(n=2)).json()
            assert [choice["message"]["content"] for choice in several["choices"]] == [text, text]
            long = [{"role": "user", "content": "x" * 10_000}]
            refused = client.post("/v3/chat/completions", json=_body(messages=long))
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert sample(server, "ovmstrio_llm_generation_tokens_total") - before == 2 * (8 + 8 + 16)
    assert 0 < sample(server, "ovmstrio_llm_kv_cache_bytes") <= 2**30 / 10 + 1


def test_responses_and_batches_of_one_worker_are_served_by_the_other(servers: SystemServers) -> None:
    server = servers.serving("generation_workers")
    body = {"model": "tiny", "input": "Tell me", "temperature": 0, "max_output_tokens": 8}
    with each_worker(server) as clients:
        _one_engine(server)
        for first, second in (clients, clients[::-1]):
            made = first.post("/v1/responses", json=body).raise_for_status().json()
            assert second.get(f"/v1/responses/{made['id']}").json() == made
            follow = {**body, "previous_response_id": made["id"]}
            answers = [each.post("/v1/responses", json=follow).raise_for_status().json() for each in clients]
            assert len({each["output"][0]["content"][0]["text"] for each in answers}) == 1
            assert answers[0]["usage"]["input_tokens"] > made["usage"]["input_tokens"]
            stream = first.post("/v1/responses", json={**body, "background": True, "stream": True}).text
            identity = json.loads(stream.partition("data: ")[2].partition("\n")[0])["response"]["id"]
            assert second.get(f"/v1/responses/{identity}?stream=true").text == stream
            counts = [each.post("/v1/responses/input_tokens", json=follow).json()["input_tokens"] for each in clients]
            assert counts == [answers[0]["usage"]["input_tokens"]] * 2
            assert second.delete(f"/v1/responses/{made['id']}").json()["deleted"]
            assert first.get(f"/v1/responses/{made['id']}").status_code == 404
            tokens = [each.post("/tokenize", json={"messages": _body()["messages"]}).json() for each in clients]
            assert tokens[0] == tokens[1]
            texts = [each.post("/detokenize", json={"tokens": tokens[0]["tokens"]}).json() for each in clients]
            assert [each["prompt"] for each in texts] == [
                "<|im_start|>user\nTell me<|im_end|>\n<|im_start|>assistant\n"
            ] * 2
        requests = [{"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}]
        data = "\n".join(map(json.dumps, requests))
        source = clients[0].post("/v1/files", data={"purpose": "batch"}, files={"file": ("in", data)}).json()["id"]
        sent = {"input_file_id": source, "endpoint": "/v1/responses", "completion_window": "1h"}
        batch = clients[1].post("/v1/batches", json=sent).raise_for_status().json()["id"]
        for client in clients:
            until(lambda client=client: client.get(f"/v1/batches/{batch}").json()["status"] == "completed")  # type: ignore[misc]
            output = client.get(f"/v1/batches/{batch}").json()["output_file_id"]
            assert json.loads(client.get(f"/v1/files/{output}/content").text)["response"]["status_code"] == 200


@pytest.fixture
def entry(tmp_path: Path) -> dict[str, Any]:
    return {"name": "tiny", "base_path": str(write_tiny_folder(tmp_path / "llm")), "cache_size": 0.1}


@pytest.fixture
def own_server(tmp_path: Path, entry: dict[str, Any]) -> Iterator[OvmsProcess]:
    file = write_config(tmp_path, text_model_config_list=[{"config": entry}])
    options = ("--workers", "2", "--file_system_poll_wait_seconds", "0")
    with serving("--config_path", str(file), *options, log=tmp_path / "log") as server:
        yield server


@pytest.mark.slow
def test_another_engine_replaces_one_that_ends_alone_or_with_its_worker(own_server: OvmsProcess) -> None:
    with each_worker(own_server) as clients:
        for client in clients:
            engine = _one_engine(own_server)
            with client.stream("POST", "/v3/chat/completions", json=_body(**LONG)) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: {")
                engine.kill()
                assert any("error" in line for line in lines)
            until(lambda engine=engine: engine not in _engines(own_server))  # type: ignore[misc]  # the loop's own
            _one_engine(own_server)
        assert len({_text(client) for client in clients}) == 1
    owner = _one_engine(own_server).parent()
    assert owner is not None
    owner.kill()
    until(lambda: not owner.is_running())
    _one_engine(own_server)
    with each_worker(own_server) as clients:
        assert len({_text(client) for client in clients}) == 1


@pytest.mark.slow
def test_a_reload_replaces_the_engine_whichever_worker_gets_it(
    own_server: OvmsProcess, tmp_path: Path, entry: dict[str, Any]
) -> None:
    with each_worker(own_server) as clients:
        for number, client in enumerate(clients):
            before = _one_engine(own_server)
            write_config(tmp_path, text_model_config_list=[{"config": {**entry, "max_num_seqs": 10 + number}}])
            assert client.post("/v1/config/reload").status_code == 201
            assert len({_text(each) for each in clients}) == 1
            until(lambda before=before: before not in _engines(own_server))  # type: ignore[misc]  # the loop's own
            assert len(_engines(own_server)) == 1


@pytest.mark.slow
def test_no_text_call_fails_at_a_rolling_restart(own_server: OvmsProcess) -> None:
    over = threading.Event()
    texts: list[tuple[str, int]] = []
    failures: list[str] = []

    def repeat() -> None:
        while not over.is_set():
            with httpx.Client(base_url=own_server.rest, timeout=WAIT_SECONDS) as client:
                try:
                    texts.append(_text(client))
                except httpx.HTTPError as error:
                    failures.append(repr(error))

    _one_engine(own_server)
    threads = [threading.Thread(target=repeat) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(texts) > 5 or bool(failures))
        own_server.process.send_signal(signal.SIGHUP)
        until(lambda: "rolling restart finished" in own_server.printed_so_far(), seconds=120)
        goal = len(texts) + 5
        until(lambda: len(texts) > goal or bool(failures))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert len({*texts}) == 1
