from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from ovmstrio.samples import prepare_repository
from tests.support.command_server import CLOSED
from tests.support.commands import on_terminal, piped
from tests.support.graphs import graph_text, python_node
from tests.support.plain_http import ChatServer, chat_server, relaying
from tests.support.ports import free_ports
from tests.support.projects import write_project
from tests.support.served_in_thread import ServedInThread
from tests.support.waits import until

both_protocols = pytest.mark.parametrize("protocol", ["gRPC", "REST"])


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rows") / "many.npy"
    np.save(file, np.ones((1_000_000, 2), np.float32))
    return str(file)


@pytest.fixture
def closed(folder: Path) -> Iterator[Path]:
    file = folder / CLOSED
    file.unlink(missing_ok=True)
    yield file
    for _ in range(6000):
        if file.exists():
            break
        Event().wait(0.01)
    assert file.read_text() == "endless"


def _sequence(url: str, many: str, *options: str, model: str = "sum") -> tuple[str, ...]:
    return ("sequence", "run", "--model", model, "--input", many, "--url", url, *options)


def _url(server: ServedInThread, protocol: str) -> str:
    return server.rest if protocol == "REST" else f"grpc://{server.grpc}"


def _open_sequences(server: ServedInThread) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = server.ask("GET", "/v2/models/sum/sequences").json()["sequences"]
    return listed


def _is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_an_interrupted_infer_ends_without_a_message(server: ServedInThread, tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.arange(10, dtype=np.float32))
    target = ("--model", "dummy", "--input", str(tmp_path / "b.npy"), "--url", server.grpc)
    with piped("infer", *target, "--repeat", "10000000") as command:
        command.stderr.readline()  # The note on the batch axis precedes the calls.
        command.interrupt()
        assert command.end() == (130, "")


@both_protocols
def test_an_interrupted_sequence_run_ends_the_sequence(server: ServedInThread, many: str, protocol: str) -> None:
    with piped(*_sequence(_url(server, protocol), many, "--json")) as command:
        for _ in range(20):
            command.stdout.readline()
        assert len(_open_sequences(server)) == 1
        command.interrupt()
        code, errors = command.end()
    assert (code, "Traceback" in errors) == (130, False), errors
    assert _open_sequences(server) == []


@both_protocols
def test_a_second_interrupt_does_not_wait_for_the_server(server: ServedInThread, many: str, protocol: str) -> None:
    target, scheme, sequence = (server.http, "http", "8") if protocol == "REST" else (server.grpc, "grpc", "7")
    with (
        relaying(target) as relay,
        piped(
            *_sequence(f"{scheme}://{relay.address}", many, "--json", "--sequence-id", sequence, model="left")
        ) as command,
    ):
        command.stdout.readline()
        relay.hold()
        command.discard_stdout()
        command.interrupt()
        while "Ctrl-C again" not in (line := command.stderr.readline()):
            assert line, "the command ended at the first interrupt"
        command.interrupt()
        code, errors = command.end()
    assert code == 130
    assert f"sequence {sequence} may remain on the server until its idle timeout: interrupted" in errors
    assert "Traceback" not in errors


def test_sequence_run_reports_a_lost_server(server: ServedInThread, many: str) -> None:
    with relaying(server.grpc) as relay, piped(*_sequence(relay.address, many, "--json", model="left")) as command:
        command.stdout.readline()
        relay.cut()
        code, errors = command.end()
    assert code == 2
    assert "may remain on the server" in errors
    assert "is the server running?" in errors


def test_a_closed_pipe_ends_the_sequence(server: ServedInThread, many: str) -> None:
    with piped(*_sequence(server.grpc, many, "--json")) as command:
        command.stdout.readline()
        command.stdout.close()
        assert command.process.wait(60) == 1
        assert "Traceback" not in command.stderr.read()
    assert _open_sequences(server) == []


def test_a_terminal_shows_the_progress_of_a_sequence(server: ServedInThread, many: str) -> None:
    with on_terminal(*_sequence(server.grpc, many)) as command:
        command.wait_for("steps/s")
        assert "/1000000" in command.shown
        command.interrupt()
        assert command.end() == 130
    assert _open_sequences(server) == []


@pytest.mark.usefixtures("closed")
def test_a_closed_pipe_closes_the_generator(server: ServedInThread) -> None:
    with piped("stream", "--model", "words", "--input", "endless", "--url", server.grpc) as command:
        assert command.stdout.read(5) == "more "
        command.stdout.close()
        assert command.process.wait(60) == 1
        assert command.stderr.read() == ""


def test_an_interrupted_stream_without_requests_ends_without_a_message(server: ServedInThread) -> None:
    with piped("stream", "--model", "words", "--requests", "-", "--url", server.grpc) as command:
        command.stdin.write('{"inputs": {"text": "hi"}}\n')
        command.stdin.flush()
        assert command.stdout.read(3) == "hi "
        command.interrupt()
        assert command.process.wait(60) == 130
        assert command.stderr.read() == ""


@pytest.mark.usefixtures("closed")
def test_an_interrupted_stream_on_a_terminal_is_cancelled(server: ServedInThread) -> None:
    with on_terminal("stream", "--model", "words", "--input", "endless", "--url", server.grpc) as command:
        command.wait_for("more", times=3)
        command.interrupt()
        assert command.end() == 130


@pytest.fixture
def chat() -> Iterator[ChatServer]:
    with chat_server() as running:
        running.deltas = [{"content": "Once upon"}, None]
        yield running


def test_an_interrupt_stops_the_answer_and_not_the_conversation(chat: ChatServer) -> None:
    with on_terminal("chat", "chat", "--url", chat.url) as command:
        command.wait_for("/help lists commands")
        command.wait_for("> ")
        command.type("Tell me\n")
        command.wait_for("Once upon")
        command.interrupt()
        command.wait_for("stopped")
        assert chat.left.wait(60)
        chat.deltas = [{"role": "assistant", "content": None}, {"content": "Hel"}, {"content": "lo"}]
        for line, answer in (("Again", "3 tokens"), ("/help", "/reset")):
            command.type(f"{line}\n")
            command.wait_for(answer)
        assert "Hello" in command.shown
        command.type("/exit\n")
        assert command.end() == 0
    assert chat.asked[1]["messages"] == [
        {"role": "user", "content": "Tell me"},
        {"role": "assistant", "content": "Once upon"},
        {"role": "user", "content": "Again"},
    ]


def test_top_reconnects_and_keeps_its_figures(server: ServedInThread) -> None:
    with relaying(server.http) as relay, on_terminal("top", "--url", relay.address, "--interval", "0.1") as command:
        command.wait_for("pixels")
        command.wait_for("sorted by req/s")
        command.type("s")
        command.wait_for("sorted by err/s")
        relay.cut()
        command.wait_for("trying again")
        command.type("q")
        assert command.end() == 0


def test_an_interrupted_top_ends_without_a_message() -> None:
    (port,) = free_ports(1)
    with on_terminal("top", "--url", f"127.0.0.1:{port}", "--interval", "0.1") as command:
        command.wait_for("trying again")
        command.interrupt()
        assert command.end() == 130


_SLOW_NODE = """
import time

for _ in range(600):
    time.sleep(0.1)
"""
_HANDLER = """
class Handler:
    def handle_get(self):
        return "a"
"""
_STARTS = {
    "model": ("serve", "--model_name", "m", "--model_path", "{folder}/iris", "--crash_probe", "retry", "{ports}"),
    "slow import": ("serve", "--model_name", "slow", "--model_path", "{folder}/slow", "{ports}"),
    "project": ("serve", "{folder}/project/nucleus.yaml", "--port", "0"),
    "demo": ("demo", "{ports}"),
    "check": ("check", "{folder}/iris"),
    "check of a slow import": ("check", "{folder}/slow"),
    "prepare": ("prepare", "{folder}/iris/1/model.xml", "--force", "--repository", "{folder}/prepared"),
    "infer": ("infer", "--model", "m", "--input", "x=1", "--url", "{silent}"),
    "top": ("top", "--url", "127.0.0.1:1"),
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a model, a graph whose Python node is imported for a minute, and a handler project."""
    folder = prepare_repository(tmp_path_factory.mktemp("starts")).parent
    (folder / "slow").mkdir()
    (folder / "slow" / "node.py").write_text(_SLOW_NODE)
    (folder / "slow" / "graph.pbtxt").write_text(graph_text(python_node("node.py")))
    write_project(folder / "project", _HANDLER)
    return folder


def _interrupt_after(imports: int, arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    with on_terminal(*arguments, variables=variables) as command:
        command.wait_for("import time:", imports)
        command.interrupt()
        return command.end(), command.shown


_MOMENTS = [60, 300, *(pytest.param(count, marks=pytest.mark.slow) for count in (150, 400))]


@pytest.mark.parametrize("imports", _MOMENTS)
@pytest.mark.parametrize("start", _STARTS)
def test_ctrl_c_ends_a_starting_command_without_a_traceback(starts: Path, start: str, imports: int) -> None:
    ports = " --port {} --rest_port {}".format(*free_ports(2))
    # Python prints a line for each import, which makes the moment of the interrupt independent of the machine.
    variables = {"PYTHONPROFILEIMPORTTIME": "1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line = " ".join(_STARTS[start]).format(folder=starts, ports=ports, silent=address)
        code, output = _interrupt_after(imports, line.split(), variables)
    shown = [line for line in output.splitlines() if "import time:" not in line]
    # A server that has begun to load drains.
    assert code in ({0, 130} if start in {"model", "slow import", "project"} else {130}), shown
    assert [line for line in shown if "Traceback" in line or "KeyboardInterrupt" in line] == []


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_a_server_while_the_code_of_a_node_is_imported(starts: Path, presses: int) -> None:
    ports = " --port {} --rest_port {}".format(*free_ports(2))
    line = " ".join(_STARTS["slow import"]).format(folder=starts, ports=ports)
    with on_terminal(*line.split()) as command:
        command.wait_for("service loading")
        command.interrupt()
        if presses == 2:
            command.wait_for("draining")
            command.interrupt()
        code = command.end()
    assert code in ({0} if presses == 1 else {0, 1, 130}), command.shown
    assert "Traceback" not in command.shown
    assert "AVAILABLE" not in command.shown


def test_ctrl_c_ends_a_server_while_its_model_is_downloaded() -> None:
    grpc, rest = map(str, free_ports(2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/m.onnx"
        options = ("--model_name", "m", "--model_path", address, "--port", grpc, "--rest_port", rest)
        with on_terminal("serve", *options) as command:
            silent.settimeout(60)
            connection, _ = silent.accept()
            command.interrupt()
            assert command.end() == 130, command.shown
            connection.close()
    assert "Traceback" not in command.shown


def test_an_interrupt_during_imports_ends_without_a_message() -> None:
    code = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "ovmstrio.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from ovmstrio.cli.entry import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_demo_that_is_interrupted_before_its_answers_exits_as_interrupted() -> None:
    grpc, rest = free_ports(2)
    with piped("demo", "--port", str(grpc), "--rest_port", str(rest)) as command:
        until(lambda: _is_listening(rest))
        command.interrupt()
        code, errors = command.end()
    assert (code, "Traceback" in errors, "not running" in errors) == (130, False, False), errors


@pytest.mark.parametrize("number", range(1, 6))
def test_a_server_that_is_stopped_while_it_loads_models_exits_with_success(tmp_path: Path, number: int) -> None:
    config = prepare_repository(tmp_path)
    grpc, rest = free_ports(2)
    ports = ("--port", str(grpc), "--rest_port", str(rest), "--crash_probe", "off")
    with piped("serve", "--config_path", str(config), *ports) as command:
        for _ in range(number):
            while "service loading" not in (line := command.stderr.readline()):
                assert line
        command.interrupt()
        code, errors = command.end()
    assert code == 0, errors


def test_demo_serves_until_it_is_interrupted() -> None:
    grpc, rest = free_ports(2)
    with piped("demo", "--port", str(grpc), "--rest_port", str(rest)) as command:
        command.discard_stdout()
        shown = ""
        while "file_type.client" not in shown:
            line = command.stderr.readline()
            assert line, shown
            shown += line
        command.interrupt()
        code, errors = command.end()
    assert (code, "Traceback" in errors) == (0, False), shown + errors
    assert f"curl -s http://127.0.0.1:{rest}/v2/models/iris/infer" in shown
