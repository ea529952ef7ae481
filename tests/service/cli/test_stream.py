"""`ovms stream` as people and scripts use it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.graphs import LOOPBACK, graph_text, python_node
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, run_ovms, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e

HANDLER = """
import time
from pyovms import Tensor, current_context

class OvmsPythonModel:
    def execute(self, inputs):
        given = {tensor.name: bytes(tensor) for tensor in inputs}
        text = given["text"].decode()
        if text == "fail":
            raise ValueError("as asked")
        try:
            if text == "endless":
                for number in range(10_000):
                    yield [Tensor("word", b"more ")]
                    time.sleep(0.01)
            if text == "letters":
                for byte in "h\u00e9\u2028\U0001f468\u200d\U0001f469".encode():
                    yield [Tensor("word", bytes([byte]))]
                return
            if text == "late":
                yield [Tensor("word", b"so far")]
                raise ValueError("as asked")
            for word in text.split():
                yield [Tensor("word", word.encode() + b" ")]
            limit = current_context().parameters.get("limit", 0)
            yield [Tensor("more", inputs[-1] if len(inputs) > 1 else memoryview(bytes(limit)))]
        finally:
            open(__file__ + ".closed", "a").write(text)
"""

WORDS = graph_text(
    python_node("handler.py", ["A:text"], ["WORD:word", "MORE:more"], more=LOOPBACK),
    inputs=["OVMS_PY_TENSOR:text"],
    outputs=["OVMS_PY_TENSOR_A:word", "OVMS_PY_TENSOR_B:more"],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph that streams the words of a text."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "graph.pbtxt").write_text(WORDS)
    (folder / "handler.py").write_text(HANDLER)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[OvmsProcess]:
    """Serve it."""
    with serving("--model_name", "words", "--model_path", str(folder)) as running:
        yield running


def ask(server: OvmsProcess, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command against the server."""
    address = server.rest if "--rest" in options else server.grpc
    return run_ovms("stream", "--model", "words", *options, "--url", address)


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_text_is_printed_as_it_comes(server: OvmsProcess, protocol: str) -> None:
    """In a pipe, the pieces stand one after the other."""
    answer = ask(server, "--input", "once upon a time", protocol)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.rstrip() == "once upon a time"


def test_json_is_a_line_for_each_reply(server: OvmsProcess) -> None:
    """Timestamps and outputs by name, numbers as numbers."""
    answer = ask(server, "--input", "text=a b", "--timestamp", "7", "--json", "--parameter", "limit=2")
    assert [json.loads(line) for line in answer.stdout.splitlines()] == [
        {"timestamp": 7, "outputs": {"word": "a "}},
        {"timestamp": 8, "outputs": {"word": "b "}},
        {"timestamp": 9, "outputs": {"more": [0, 0]}},
    ]


def test_verbose_tells_timestamps_and_times(server: OvmsProcess) -> None:
    """Each output has a line; the times are on standard error."""
    answer = ask(server, "--input", "a b", "--timestamp", "3", "--verbose")
    assert [line.split() for line in answer.stdout.splitlines()[:2]] == [["3", "word", "a"], ["4", "word", "b"]]
    assert "first output after" in answer.stderr
    assert "3 outputs" in answer.stderr


def test_a_file_is_read_and_a_text_need_not_be_one(server: OvmsProcess, tmp_path: Path) -> None:
    """What exists is read, what begins with @ must exist."""
    path = tmp_path / "prompt.txt"
    path.write_text("from a file")
    assert ask(server, "--input", str(path)).stdout.rstrip() == "from a file"
    assert ask(server, "--input", f"text=@{path}").stdout.rstrip() == "from a file"
    missing = ask(server, "--input", f"@{tmp_path / 'none'}")
    assert missing.returncode == 64
    assert "No such file" in missing.stderr


def test_several_requests_go_over_one_stream(server: OvmsProcess, tmp_path: Path) -> None:
    """Lines of a file are requests, each with its own timestamp."""
    path = tmp_path / "requests.jsonl"
    path.write_text('{"inputs": {"text": "a"}, "timestamp": 1}\n\n{"inputs": {"text": "b c"}, "timestamp": 50}\n')
    answer = ask(server, "--requests", str(path), "--json")
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [(each["timestamp"], *each["outputs"].values()) for each in found if "word" in each["outputs"]] == [
        (1, "a "),
        (50, "b "),
        (51, "c "),
    ]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 1: expected a JSON object"),
        ('{"inputs": {"txt": "a"}}', "line 1: unknown: txt; the inputs are text"),
        ('{"inputs": {"text": [[1], [2, 3]]}}', "line 1: text"),
        ('{"inputs": {"text": [{}]}}', "line 1: text: expected a text, numbers or truth values"),
        ('{"inputs": {"text": "\\ud800"}}', "line 1: text"),
        ('{"inputs": ["text"]}', 'line 1: expected {"inputs"'),
        ('{"timestamp": "5"}', 'line 1: timestamp: expected an integer, got "5"'),
        ('{"timestamp": 9223372036854775808}', "line 1: timestamp: 9223372036854775808 is no integer of 64 bits"),
        ('{"parameters": {"x": 1.5}}', "line 1: parameters: expected an object"),
    ],
)
def test_a_line_that_is_no_request_is_told(server: OvmsProcess, tmp_path: Path, line: str, text: str) -> None:
    """Line, fault and what would be right."""
    path = tmp_path / "requests.jsonl"
    path.write_text(line)
    answer = ask(server, "--requests", str(path))
    assert answer.returncode == 1
    assert text in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_failing_node_is_told_and_is_an_exit_code(server: OvmsProcess) -> None:
    """Type, text and place of the exception come through once, with the status."""
    answer = ask(server, "--input", "fail")
    assert answer.returncode == 1
    assert answer.stderr.count("ValueError: as asked (handler.py:10)") == 1
    assert "gRPC status INVALID_ARGUMENT" in answer.stderr


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_what_came_before_a_failure_is_shown(server: OvmsProcess, protocol: str) -> None:
    """It ends its line."""
    answer = ask(server, "--input", "late", protocol)
    assert (answer.returncode, answer.stdout) == (1, "so far\n")
    assert "ValueError: as asked" in answer.stderr


def test_letters_may_be_cut(server: OvmsProcess) -> None:
    """A text is put together of parts of letters."""
    assert ask(server, "--input", "letters").stdout == "h\u00e9\u2028\U0001f468\u200d\U0001f469\n"


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_marks_within_signs_are_text(server: OvmsProcess, protocol: str) -> None:
    """What joins signs has no width, and is no control character."""
    text = "a\u2060b\U0001f468\u200d\U0001f469 c"
    answer = ask(server, "--input", text, "--json", protocol)
    assert answer.returncode == 0, answer.stderr
    found = [json.loads(line)["outputs"] for line in answer.stdout.splitlines()]
    assert [each["word"] for each in found if "word" in each] == [f"{word} " for word in text.split()]


def test_a_reader_that_leaves_ends_the_stream_quietly(server: OvmsProcess, folder: Path) -> None:
    """As `head` does: nothing is said, and the generator is closed."""
    closed = folder / "handler.py.closed"
    closed.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ovms_cli", "stream", "--model", "words", "--input", "endless"]
    with subprocess.Popen(
        [*command, "--url", server.grpc], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == "more "
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr.read() == ""
    _wait_for(closed)


def test_ctrl_c_ends_a_stream_that_waits_for_requests(server: OvmsProcess) -> None:
    """Nothing is said of the thread that reads standard input."""
    command = [sys.executable, "-m", "ovms_cli", "stream", "--model", "words", "--requests", "-", "--url", server.grpc]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write('{"inputs": {"text": "hi"}}\n')
        process.stdin.flush()
        assert process.stdout.read(3) == "hi "
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == ""


def test_an_absent_server_and_an_unknown_graph_are_told_apart(server: OvmsProcess) -> None:
    """2 is nobody there, 1 is no."""
    (port,) = free_ports(1)
    assert run_ovms("stream", "--model", "words", "--input", "a", "--url", f"127.0.0.1:{port}").returncode == 2
    assert run_ovms("stream", "--model", "nobody", "--input", "a", "--url", server.grpc).returncode == 1


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ((), 64, "either --input or --requests"),
        (("--requests", "-", "--timestamp", "3"), 64, "belong to --input"),
        (("--input", "x", "--parameter", "limit"), 64, "expected NAME=VALUE"),
        (("--requests", "/no/such/file"), 64, "No such file"),
        (("--input", "text=a", "--input", "text=b"), 64, "given twice"),
        (("--input", "txt=a"), 64, 'no input is called "txt"; the graph takes text; for a text that begins so'),
        (("--input", "a", "--timestamp", str(2**63)), 64, "no integer of 64 bits"),
        (("--input", "a", "--parameter", f"x={2**63}"), 64, "no integer of 64 bits"),
    ],
)
def test_a_wrong_command_line_is_said(server: OvmsProcess, options: tuple[str, ...], code: int, text: str) -> None:
    """Before anything is sent."""
    answer = ask(server, *options)
    assert answer.returncode == code
    assert text in answer.stderr


def test_arrays_travel_with_their_type(server: OvmsProcess, tmp_path: Path) -> None:
    """A file of numpy's is a tensor."""
    path = tmp_path / "text.npy"
    np.save(path, np.frombuffer(b"a b", np.uint8))
    assert ask(server, "--input", str(path)).stdout.rstrip() == "a b"


def test_ctrl_c_cancels_the_generation(server: OvmsProcess, folder: Path) -> None:
    """The text stands, the exit code is that of an interrupt, and the generator is closed at once."""
    closed = folder / "handler.py.closed"
    closed.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ovms_cli", "stream", "--model", "words", "--input", "endless"]
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*command, "--url", server.grpc], stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        shown = b""
        while shown.count(b"more") < 3:
            shown += os.read(leader, 4096)
        process.send_signal(signal.SIGINT)
        _drain(leader)
        assert process.wait(20) == 130
    os.close(leader)
    _wait_for(closed)
    assert closed.read_text() == "endless"


def _wait_for(path: Path) -> None:
    """Return once a file is there; the server writes it when a generator is closed."""
    ends = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < ends, "the generator was not closed"
        threading.Event().wait(0.01)


def _drain(leader: int) -> None:
    """Read a terminal to its end."""
    try:
        while os.read(leader, 4096):
            pass
    except OSError:
        # The other end is closed.
        return
