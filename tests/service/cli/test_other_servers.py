from __future__ import annotations

import csv
import io
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.cli.trace_figures import NoFigures, find_url, open_source
from ovmstrio.conformance.__main__ import main
from ovmstrio.conformance.grpc_cases import GRPC_CASES
from ovmstrio.conformance.rest_cases import REST_CASES
from ovmstrio.util.truncation import CONTROLS
from tests.support import ir
from tests.support.commands import CommandResult, run_command, run_on_terminal
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.ops import op_figures
from tests.support.plain_http import ChatServer, QuietHandler, answering_http, chat_server
from tests.support.ports import free_ports
from tests.support.served_in_thread import serving_in_thread


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_demo_gets_right_answers_over_both_protocols(cache: Path) -> None:
    grpc, rest = free_ports(2)
    result = run_command("demo", "--once", "--port", str(grpc), "--rest-port", str(rest))
    assert result.exit_code == 0, result.output
    assert "32 of 32 answers are right" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if row.count("ok") == 2] == [
        *["add_one", "iris", "iris", "iris", *["file_type"] * 5],
        *["incrementer", "labels_image", "counter_stream"],
        *["ensemble"] * 4,
    ]
    for answer in ("setosa", "versicolor", "virginica", "png", "python", "json", "npy", "zip"):
        assert any(answer in row for row in rows)
    assert len(list((cache / "ovmstrio").glob("samples-*/config.json"))) == 1


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("taken", "other"), [("--port", "--rest-port"), ("--rest-port", "--port")])
def test_demo_reports_a_port_in_use_with_its_option(taken: str, other: str) -> None:
    (free,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        result = run_command("demo", "--once", taken, str(port), other, str(free))
    assert result.exit_code == 1
    assert f"port {port} is in use by another program; choose another with {taken}" in result.stderr


def test_demo_refuses_one_port_for_both_protocols() -> None:
    result = run_command("demo", "--port", "9", "--rest-port", "9")
    assert (result.exit_code, "must differ" in result.stderr) == (64, True)


@pytest.mark.parametrize("model", ["numbers", "texts"])
def test_this_server_passes_every_conformance_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    made = ir.sum_of_two((-1, 5)) if model == "numbers" else ir.string_passthrough()
    base = ir.save(made, tmp_path, "m")
    with serving_in_thread(model_name="m", model_path=base) as server:
        capsys.readouterr()
        code = main([f"http://{server.http}", "--grpc", server.grpc, "--output", "json"])
        printed = capsys.readouterr().out

    results = json.loads(printed[printed.index("[\n") : printed.rindex("\n]") + 2])
    assert [each for each in results if each["outcome"] != "passed"] == []
    assert (code, len(results)) == (0, len(REST_CASES) + len(GRPC_CASES))


class _AnsweringHandler(QuietHandler):
    def _answer(self, status: int, document: object) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Agreeable(_AnsweringHandler):
    def do_GET(self) -> None:  # noqa: N802 - the library's name
        self._answer(200, [])

    do_POST = do_GET  # noqa: N815 - the library's name


def test_a_server_without_the_protocol_fails_the_conformance_cases(capsys: pytest.CaptureFixture[str]) -> None:
    with answering_http(_Agreeable) as url:
        code = main([url, "--model", "m"])

    *lines, last = capsys.readouterr().out.splitlines()
    assert (code, last) == (1, "m: 3 passed, 20 failed, 0 skipped")
    assert sum(line.startswith("failed") and "(expected" in line for line in lines) == 20


def test_an_unreachable_server_fails_every_conformance_case_and_needs_a_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["http://127.0.0.1:9", "--grpc", "127.0.0.1:9", "--model", "m"]) == 1
    counts = f"0 passed, {len(REST_CASES) + len(GRPC_CASES)} failed, 0 skipped"
    assert counts in capsys.readouterr().out
    assert main(["http://127.0.0.1:9"]) == 2
    assert "give --model" in capsys.readouterr().err


NAME = "\x1b]0;t\x07\x9b2J\u202e[red]a\x7f[/red]\u2028"
SHOWN = "\\x1b]0;t\\x07\\x9b2J\\u202e[red]a\\x7f[/red]\\u2028"


class _Hostile(_AnsweringHandler):
    def do_GET(self) -> None:  # noqa: N802 - the library's name
        if self.path.startswith(("/v2/health", "/v2/models/bad")):
            self._answer(404, {"error": f"no {NAME}"})
        else:
            self._answer(200, {"name": NAME, "platform": NAME, "versions": ["1"], "inputs": [], "outputs": []})

    def do_POST(self) -> None:  # noqa: N802 - the library's name
        if "index" in self.path:
            states = [{"name": NAME, "version": "1", "state": "UNAVAILABLE", "reason": NAME}]
            self._answer(200, [*states, {"name": "b", "version": NAME, "state": NAME, "reason": ""}])
        else:
            self._answer(400, {"error": NAME})


@pytest.fixture(scope="module")
def hostile_server() -> Iterator[str]:
    with answering_http(_Hostile) as url:
        yield url.removeprefix("http://")


COMMANDS = [
    ["models"],
    ["models", "--format", "csv"],
    ["models", "bad"],
    ["infer", "--model", "m", "--input", "x=1"],
    ["health"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_terminal_gets_names_and_errors_of_a_server_escaped(arguments: list[str], hostile_server: str) -> None:
    options = ("--url", hostile_server)
    written = run_on_terminal(*arguments, *options)[1]
    # Bold headings are rich's own.
    written = re.sub(r"\x1b\[[0-9;]*m|\r\n", "", written)
    assert CONTROLS.findall(written) == []
    assert "\\x1b" in written
    assert "[red]a\\x7f[/red]" in re.sub(r"\s+", "", written)


def test_a_table_in_a_pipe_has_the_names_of_a_server_escaped(hostile_server: str) -> None:
    written = run_command("models", "--url", hostile_server).stdout
    assert set(CONTROLS.findall(written)) == {"\n"}
    assert SHOWN in written


class _Figures(_AnsweringHandler):
    def do_GET(self) -> None:  # noqa: N802 - the library's name
        self._answer(200, op_figures() if self.path == "/trace" else {"ops": 1})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with answering_http(_Figures) as url:
        yield url.removeprefix("http://")


def test_trace_prints_figures_in_every_format(address: str) -> None:
    target = ("paddle", "trace", address, "--once")
    lines = run_command(*target).stdout.splitlines()
    assert next(line for line in lines if line.startswith("det")).split("  ")[0] == "det"
    assert any(line.startswith("det") and "12 / 16 / 16" in line for line in lines)
    assert any(line.startswith("chl0") for line in lines)
    rows = list(csv.DictReader(io.StringIO(run_command(*target, "--format", "csv").stdout)))
    (midp,) = (row for row in rows if (row["op"], row["stage"]) == ("det", "midp"))
    assert float(midp["p50_ms"]) == pytest.approx(12)
    assert (midp["samples"], midp["died"]) == ("4", "1")
    printed = run_command("paddle", "trace", f"http://{address}/", "--once", "--json")
    assert json.loads(printed.stdout) == op_figures()


def test_trace_takes_the_port_from_a_configuration(address: str, tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(f"http_port: {address.rpartition(':')[2]}\n")
    for target in (tmp_path, tmp_path / "config.yml"):
        assert find_url(str(target)) == f"http://{address}"
        assert run_command("paddle", "trace", str(target), "--once").exit_code == 0


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("http://{address}/other", 1, "no figures of a pipeline"),
        ("127.0.0.1:{free}", 2, "is the server running?"),
        ("rpc.yml", 64, "no http_port"),
        ("wrong.yml", 64, "wrong.yml:1: "),
        ("nothing.yml", 64, "no such file"),
        ("box:port", 64, "is neither a file nor HOST:PORT"),
    ],
)
def test_a_failed_trace_has_an_exit_code(
    address: str, command_folder: Path, target: str, code: int, message: str
) -> None:
    (free,) = free_ports(1)
    (command_folder / "rpc.yml").write_text("rpc_port: 9998\n")
    (command_folder / "wrong.yml").write_text("a: [")
    ended = run_command("paddle", "trace", target.format(address=address, free=free), "--once")
    assert (ended.exit_code, message in " ".join(ended.output.split())) == (code, True), ended.output


async def test_figures_of_a_served_pipeline_are_read() -> None:
    async with (
        serving_pipeline(EchoExecutor(), snapshot=op_figures) as running,
        open_source(f"http://{running.rest[0]}", 5) as read,
    ):
        assert await read() == op_figures()
    async with serving_pipeline(EchoExecutor()) as running, open_source(f"http://{running.rest[0]}", 5) as read:
        with pytest.raises(NoFigures, match="status 404"):
            await read()


_HELLO: list[dict[str, Any] | None] = [{"role": "assistant", "content": None}, {"content": "Hel"}, {"content": "lo"}]


@pytest.fixture
def chat_answers() -> Iterator[ChatServer]:
    with chat_server() as running:
        running.deltas = list(_HELLO)
        yield running


def _chat(chat_answers: ChatServer, *arguments: str, stdin: str | bytes = "") -> CommandResult:
    return run_command("chat", *arguments, "--url", chat_answers.url, stdin=stdin)


def test_one_answer_is_printed_alone_or_with_its_figures(chat_answers: ChatServer) -> None:
    done = _chat(
        chat_answers, "chat", "--once", "Hi", "--system", "Be short.", "--max-tokens", "5", "--temperature", "0"
    )
    assert (done.exit_code, done.stdout) == (0, "Hello\n"), done.stderr
    assert chat_answers.asked == [
        {
            "model": "chat",
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "temperature": 0,
        }
    ]
    done = _chat(chat_answers, "chat", "--once", "Hi", "--json")
    facts = json.loads(done.stdout)
    assert (facts["model"], facts["text"], facts["finish_reason"]) == ("chat", "Hello", "stop")
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (7, 3)
    assert facts["seconds"] >= facts["first_seconds"] > 0


def test_a_message_comes_from_a_pipe_and_the_server_from_a_url(chat_answers: ChatServer) -> None:
    assert _chat(chat_answers, "--once", "-", stdin="one\ntwo\n").exit_code == 0
    assert chat_answers.asked[0]["messages"] == [{"role": "user", "content": "one\ntwo\n"}]
    for url in (chat_answers.url, chat_answers.url.removesuffix("/v3")):
        done = run_command("chat", url, "--model", "second", "--once", "Hi")
        assert (done.exit_code, done.stdout) == (0, "Hello\n"), done.stderr
    assert [asked["model"] for asked in chat_answers.asked] == ["first", "second", "second"]


@pytest.mark.parametrize("arguments", [["--once", "-"], []], ids=["once", "lines"])
def test_a_message_in_another_encoding_is_sent(chat_answers: ChatServer, arguments: list[str]) -> None:
    done = _chat(chat_answers, *arguments, stdin="Grüße".encode("latin-1"))
    assert done.exit_code == 0, done.stderr
    assert chat_answers.asked[0]["messages"] == [
        {"role": "user", "content": "Gr\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}e"}
    ]


def test_lines_of_a_pipe_are_a_conversation(chat_answers: ChatServer) -> None:
    lines = "Hi\n\nAgain\n/reset\n/system Be short.\nOnce\\\nmore\n/exit\nno\n"
    done = _chat(chat_answers, "chat", "--format", "csv", stdin=lines)
    assert done.exit_code == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [row["text"] for row in rows] == ["Hello"] * 3
    first, second, third = (asked["messages"] for asked in chat_answers.asked)
    assert first == [{"role": "user", "content": "Hi"}]
    assert second == [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Again"}]
    assert third == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Once\nmore"}]


def test_an_error_is_reported_after_the_text_that_came(chat_answers: ChatServer) -> None:
    chat_answers.late_error = "the engine has ended"
    done = _chat(chat_answers, "chat", "--once", "Hi")
    assert (done.exit_code, done.stdout, "the engine has ended" in done.stderr) == (1, "Hello\n", True)
    chat_answers.error = (404, {"error": {"message": "The model `chat` does not exist", "code": "model_not_found"}})
    done = _chat(chat_answers, "chat", "--once", "Hi")
    assert (done.exit_code, done.stdout, "The model `chat` does not exist" in done.stderr) == (1, "", True)


def test_a_refused_message_is_not_in_the_history(chat_answers: ChatServer) -> None:
    chat_answers.error = (429, {"error": "the queue is full"})
    done = _chat(chat_answers, "chat", stdin="Hi\nAgain\n")
    assert done.exit_code == 1
    assert done.stderr.count("error: the queue is full") == 2
    assert [len(asked["messages"]) for asked in chat_answers.asked] == [1, 1]


def test_the_api_key_comes_from_an_option_or_the_environment(
    chat_answers: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVMS_API_KEY", "from-outside")
    _chat(chat_answers, "chat", "--once", "Hi")
    _chat(chat_answers, "chat", "--once", "Hi", "--api-key", "given")
    assert chat_answers.keys == ["Bearer from-outside", "Bearer given"]


def test_tool_calls_are_shown_and_reasoning_and_control_characters_are_not(chat_answers: ChatServer) -> None:
    call = {"index": 0, "id": "1", "function": {"name": "weather", "arguments": '{"city":'}}
    chat_answers.deltas = [
        {"reasoning_content": "Let me think."},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Paris"}'}}]},
    ]
    assert _chat(chat_answers, "chat", "--once", "Hi").stdout == '\nweather {"city": "Paris"}\n'
    facts = json.loads(_chat(chat_answers, "chat", "--once", "Hi", "--json").stdout)
    assert (facts["reasoning"], facts["calls"]) == ("Let me think.", 'weather {"city": "Paris"}')
    chat_answers.deltas = [{"content": "\x1b[2Jgone"}]
    assert "\x1b" not in _chat(chat_answers, "chat", "--once", "Hi").stdout


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
