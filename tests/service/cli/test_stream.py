"""``ovms stream`` against a graph that streams the words of a text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import CommandResult, run_command
from tests.support.ports import free_ports
from tests.support.served_in_thread import ServedInThread

both_protocols = pytest.mark.parametrize("protocol", ["--grpc", "--rest"])


def _stream(server: ServedInThread, *options: str) -> CommandResult:
    url = server.rest if "--rest" in options else server.grpc
    return run_command("stream", "--model", "words", *options, "--url", url)


@pytest.mark.parametrize(
    ("protocol", "given", "printed"),
    [
        ("--grpc", "once upon a time", "once upon a time"),
        ("--rest", "once upon a time", "once upon a time"),
        # One output for each byte of UTF-8.
        ("--grpc", "letters", "h\u00e9\u2028\U0001f468\u200d\U0001f469"),
    ],
)
def test_text_is_printed_in_one_line(server: ServedInThread, protocol: str, given: str, printed: str) -> None:
    """The pieces are joined."""
    answer = _stream(server, "--input", given, protocol)
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout.rstrip() == printed


def test_replies_are_lines_of_json(server: ServedInThread) -> None:
    """With timestamps; numbers are numbers."""
    answer = _stream(server, "--input", "text=a b", "--timestamp", "7", "--json", "--parameter", "limit=2")
    assert [json.loads(line) for line in answer.stdout.splitlines()] == [
        {"timestamp": 7, "outputs": {"word": "a "}},
        {"timestamp": 8, "outputs": {"word": "b "}},
        {"timestamp": 9, "outputs": {"more": [0, 0]}},
    ]


def test_verbose_prints_timestamps_and_times(server: ServedInThread) -> None:
    """Outputs have a line each; times go to standard error."""
    answer = _stream(server, "--input", "a b", "--timestamp", "3", "--verbose")
    assert [line.split() for line in answer.stdout.splitlines()[:2]] == [["3", "word", "a"], ["4", "word", "b"]]
    assert "first output after" in answer.stderr
    assert "3 outputs" in answer.stderr


def test_inputs_are_read_from_files(server: ServedInThread, tmp_path: Path) -> None:
    """A text, a text after ``@`` and an array of NumPy; a missing file after ``@`` is a wrong command line."""
    text, array = tmp_path / "prompt.txt", tmp_path / "text.npy"
    text.write_text("from a file")
    np.save(array, np.frombuffer(b"a b", np.uint8))
    for given, printed in ((str(text), "from a file"), (f"text=@{text}", "from a file"), (str(array), "a b")):
        assert _stream(server, "--input", given).stdout.rstrip() == printed
    missing = _stream(server, "--input", f"@{tmp_path / 'none'}")
    assert (missing.exit_code, "No such file" in missing.stderr) == (64, True)


def test_lines_of_a_file_are_requests_of_one_stream(server: ServedInThread, tmp_path: Path) -> None:
    """Each with its own timestamp."""
    path = tmp_path / "requests.jsonl"
    path.write_text('{"inputs": {"text": "a"}, "timestamp": 1}\n\n{"inputs": {"text": "b c"}, "timestamp": 50}\n')
    answer = _stream(server, "--requests", str(path), "--json")
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    words = [(each["timestamp"], *each["outputs"].values()) for each in found if "word" in each["outputs"]]
    assert words == [(1, "a "), (50, "b "), (51, "c ")]


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
def test_a_wrong_line_of_requests_is_reported(server: ServedInThread, tmp_path: Path, line: str, text: str) -> None:
    """With its number and what was expected."""
    path = tmp_path / "requests.jsonl"
    path.write_text(line)
    answer = _stream(server, "--requests", str(path))
    assert (answer.exit_code, text in answer.stderr) == (1, True), answer.stderr


@both_protocols
@pytest.mark.parametrize(("given", "printed"), [("fail", ""), ("late", "so far\n")])
def test_a_failed_node_is_reported_after_its_outputs(
    server: ServedInThread, protocol: str, given: str, printed: str
) -> None:
    """The exception has its place in the handler and, over gRPC, the status."""
    answer = _stream(server, "--input", given, protocol)
    assert (answer.exit_code, answer.stdout) == (1, printed)
    assert answer.stderr.count("ValueError: as asked (handler.py:") == 1
    if protocol == "--grpc":
        assert "gRPC status INVALID_ARGUMENT" in answer.stderr


@pytest.mark.parametrize(
    ("code", "text", "options"),
    [
        (1, "not found", ("--input", "a", "--model", "nobody")),
        (2, "is the server running?", ("--input", "a", "--url", "free")),
        (64, "either --input or --requests", ()),
        (64, "belong to --input", ("--requests", "-", "--timestamp", "3")),
        (64, "expected NAME=VALUE", ("--input", "x", "--parameter", "limit")),
        (64, "No such file", ("--requests", "/no/such/file")),
        (64, "given twice", ("--input", "text=a", "--input", "text=b")),
        (64, 'no input is called "txt"; the graph takes text; for a text that begins so', ("--input", "txt=a")),
        (64, "no integer of 64 bits", ("--input", "a", "--timestamp", str(2**63))),
        (64, "no integer of 64 bits", ("--input", "a", "--parameter", f"x={2**63}")),
    ],
)
def test_a_refusal_has_an_exit_code_and_a_reason(
    server: ServedInThread, code: int, text: str, options: tuple[str, ...]
) -> None:
    """1 is a refusal, 2 an unreachable server, 64 a wrong command line."""
    (port,) = free_ports(1)
    given = [f"127.0.0.1:{port}" if each == "free" else each for each in options]
    for name, value in (("--model", "words"), ("--url", server.grpc)):
        given += [] if name in given else [name, value]
    answer = run_command("stream", *given)
    assert (answer.exit_code, text in answer.stderr) == (code, True), answer.stderr
