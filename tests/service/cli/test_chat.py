from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.chat_server import ChatServer, chat_server
from tests.support.commands import CommandResult, run_command
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

_HELLO: list[dict[str, Any] | None] = [{"role": "assistant", "content": None}, {"content": "Hel"}, {"content": "lo"}]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        running.deltas = list(_HELLO)
        yield running


def _chat(server: ChatServer, *arguments: str, stdin: str = "") -> CommandResult:
    return run_command("chat", *arguments, "--url", server.url, stdin=stdin)


def test_once_prints_the_answer_alone(server: ChatServer) -> None:
    done = _chat(server, "chat", "--once", "Hi", "--system", "Be short.", "--max_tokens", "5", "--temperature", "0")
    assert (done.exit_code, done.stdout) == (0, "Hello\n"), done.stderr
    assert server.asked == [
        {
            "model": "chat",
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "temperature": 0,
        }
    ]


def test_a_message_from_a_pipe_keeps_its_lines_and_the_first_model_is_the_default(server: ChatServer) -> None:
    assert _chat(server, "--once", "-", stdin="one\ntwo\n").exit_code == 0
    assert server.asked[0]["model"] == "first"
    assert server.asked[0]["messages"] == [{"role": "user", "content": "one\ntwo\n"}]


def test_a_server_is_named_by_a_url(server: ChatServer) -> None:
    for url in (server.url, server.url.removesuffix("/v3")):
        done = run_command("chat", url, "--model", "second", "--once", "Hi")
        assert (done.exit_code, done.stdout) == (0, "Hello\n"), done.stderr
    assert [asked["model"] for asked in server.asked] == ["second", "second"]


def test_json_has_the_answer_and_its_figures(server: ChatServer) -> None:
    done = _chat(server, "chat", "--once", "Hi", "--json")
    facts = json.loads(done.stdout)
    assert (facts["model"], facts["text"], facts["finish_reason"]) == ("chat", "Hello", "stop")
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (7, 3)
    assert facts["seconds"] >= facts["first_seconds"] > 0


def test_lines_of_a_pipe_are_a_conversation(server: ChatServer) -> None:
    lines = "Hi\n\nAgain\n/reset\n/system Be short.\nOnce\\\nmore\n/exit\nno\n"
    done = _chat(server, "chat", "--output", "csv", stdin=lines)
    assert done.exit_code == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [row["text"] for row in rows] == ["Hello"] * 3
    first, second, third = (asked["messages"] for asked in server.asked)
    assert first == [{"role": "user", "content": "Hi"}]
    assert second == [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Again"}]
    assert third == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Once\nmore"}]


def test_an_error_is_reported_after_the_text_that_came(server: ChatServer) -> None:
    server.late_error = "the engine has ended"
    done = _chat(server, "chat", "--once", "Hi")
    assert (done.exit_code, done.stdout, "the engine has ended" in done.stderr) == (1, "Hello\n", True)
    server.error = (404, {"error": {"message": "The model `chat` does not exist", "code": "model_not_found"}})
    done = _chat(server, "chat", "--once", "Hi")
    assert (done.exit_code, done.stdout, "The model `chat` does not exist" in done.stderr) == (1, "", True)


def test_a_refused_message_is_not_in_the_history(server: ChatServer) -> None:
    server.error = (429, {"error": "the queue is full"})
    done = _chat(server, "chat", stdin="Hi\nAgain\n")
    assert done.exit_code == 1
    assert done.stderr.count("error: the queue is full") == 2
    assert [len(asked["messages"]) for asked in server.asked] == [1, 1]


def test_the_api_key_comes_from_an_option_or_the_environment(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVMS_API_KEY", "from-outside")
    _chat(server, "chat", "--once", "Hi")
    _chat(server, "chat", "--once", "Hi", "--api_key", "given")
    assert server.keys == ["Bearer from-outside", "Bearer given"]


def test_tool_calls_are_shown_and_reasoning_is_not(server: ChatServer) -> None:
    call = {"index": 0, "id": "1", "function": {"name": "weather", "arguments": '{"city":'}}
    server.deltas = [
        {"reasoning_content": "Let me think."},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Paris"}'}}]},
    ]
    assert _chat(server, "chat", "--once", "Hi").stdout == '\nweather {"city": "Paris"}\n'
    facts = json.loads(_chat(server, "chat", "--once", "Hi", "--json").stdout)
    assert (facts["reasoning"], facts["calls"]) == ("Let me think.", 'weather {"city": "Paris"}')


def test_control_characters_of_an_answer_are_escaped(server: ChatServer) -> None:
    server.deltas = [{"content": "\x1b[2Jgone"}]
    assert "\x1b" not in _chat(server, "chat", "--once", "Hi").stdout


@pytest.mark.parametrize("path", ["/v3", ""])
def test_an_unreachable_server_exits_with_2(path: str) -> None:
    (port,) = free_ports(1)
    done = run_command("chat", "chat", "--once", "Hi", "--url", f"http://127.0.0.1:{port}{path}")
    assert done.exit_code == 2
    assert f"no server answers at http://127.0.0.1:{port}/v3" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "--model", "other"],
        ["http://localhost:1/v3", "--url", "localhost:2"],
        ["chat", "--url", "ftp://localhost"],
        ["chat", "--url", "localhost:port"],
        ["chat", "--once", " "],
    ],
)
def test_a_usage_error_exits_with_64(arguments: list[str]) -> None:
    done = run_command("chat", *arguments)
    assert done.exit_code == 64, done.stderr
