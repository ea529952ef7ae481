"""``ovms infer``, ``models`` and ``health`` against models, graphs, handlers and pipelines of Ops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.commands import CommandResult, run_command
from tests.support.ports import free_ports
from tests.support.served_in_thread import ServedInThread

both_protocols = pytest.mark.parametrize("protocol", ["--grpc", "--rest"])


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Write ten numbers to a file."""
    path = tmp_path / "b.npy"
    np.save(path, np.arange(10, dtype=np.float32))
    return str(path)


def _call(server: ServedInThread, protocol: str, command: str, *arguments: str, stdin: str = "") -> CommandResult:
    url = server.rest if protocol == "--rest" else server.grpc
    return run_command(command, protocol, "--url", url, *arguments, stdin=stdin)


def _infer(server: ServedInThread, protocol: str, model: str, given: str, *more: str, stdin: str = "") -> CommandResult:
    return _call(server, protocol, "infer", "--output", "json", "--model", model, "--input", given, *more, stdin=stdin)


def _outputs(result: CommandResult) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# Models.


@both_protocols
def test_infer_prints_outputs_as_json_and_notes_to_standard_error(
    server: ServedInThread, file: str, protocol: str
) -> None:
    """Standard output holds the answer alone."""
    done = _infer(server, protocol, "dummy", file)
    assert _outputs(done) == {"a": [[float(value) for value in range(1, 11)]]}
    assert "batch axis" in done.stderr


def test_infer_saves_outputs_and_prints_latencies(server: ServedInThread, file: str, tmp_path: Path) -> None:
    """``--repeat`` prints a summary to standard error."""
    saved = tmp_path / "a.npy"
    options = ("--output", str(saved), "--repeat", "5")
    done = _call(server, "--grpc", "infer", "--model", "dummy", "--input", f"b={file}", *options)
    assert done.exit_code == 0, done.stderr
    np.testing.assert_array_equal(np.load(saved), np.arange(1, 11, dtype=np.float32)[None])
    assert "5 calls" in done.stderr
    assert "median" in done.stderr


@pytest.mark.parametrize(
    ("code", "options", "text"),
    [
        (1, ("--model", "nobody"), "Model with requested name is not found"),
        (1, ("--model", "dummy", "--input", "nowhere.npy"), "No such file"),
        (1, ("--model", "counter_stream", "--input", "nowhere.npy"), "error: nowhere.npy: No such file or directory"),
        (2, ("--model", "dummy", "--url", "free"), "is the server running?"),
        (64, ("--model", "dummy", "--output", "answer.txt"), "--output"),
        (64, (), "--model"),
        (64, ("--model", "dummy", "--url", "127.0.0.1:99999"), "99999"),
        (64, ("--model", "dummy", "--timeout", "inf"), "--timeout"),
        (64, ("--model", "dummy", "--scale", "2"), "--scale"),
        (64, ("--model", "dummy", "--cert", "c.pem"), "belong together"),
    ],
)
def test_infer_fails_with_an_exit_code_for_each_kind_of_failure(
    server: ServedInThread, file: str, code: int, options: tuple[str, ...], text: str
) -> None:
    """1 is a refusal, 2 an unreachable server, 64 a wrong command line."""
    (port,) = free_ports(1)
    given = [f"127.0.0.1:{port}" if each == "free" else each for each in options]
    defaults = () if "--input" in given else ("--input", file)
    done = run_command("infer", *(() if "--url" in given else ("--url", server.grpc)), *given, *defaults)
    assert done.exit_code == code, done.stderr
    assert text in done.stderr


def test_infer_requires_an_input(server: ServedInThread) -> None:
    """A model without values is a wrong command line."""
    assert run_command("infer", "--model", "dummy", "--url", server.grpc).exit_code == 64


@both_protocols
def test_an_encoded_image_is_decoded_by_the_server(server: ServedInThread, tmp_path: Path, protocol: str) -> None:
    """The model gets the levels of grey in the size of its input."""
    picture = tmp_path / "i.png"
    Image.new("L", (9, 7), 200).save(picture)
    done = _infer(server, protocol, "pixels", str(picture), "--encoded")
    assert _outputs(done)["pixels"] == np.full((1, 4, 4, 1), 200.0).tolist()


@both_protocols
def test_a_stateful_model_is_refused_with_the_command_for_sequences(server: ServedInThread, protocol: str) -> None:
    """Standard error has the message of the server and the hint."""
    done = _infer(server, protocol, "sum", "-", stdin="[[1, 2]]")
    assert (done.exit_code, "Sequence ID has not been provided" in done.stderr) == (1, True)
    assert "sum serves sequences: ovms sequence run --model sum" in done.stderr


# Models and health.


def test_models_lists_inputs_and_states(server: ServedInThread) -> None:
    """As JSON and as CSV; an unknown name is refused."""
    entries = {(each["name"], each["version"]): each for each in _outputs(_call(server, "--grpc", "models", "--json"))}
    dummy = entries["dummy", "1"]
    assert (dummy["state"], dummy["inputs"]) == ("READY", [{"name": "b", "datatype": "FP32", "shape": [1, 10]}])
    shapes = {version: each["inputs"][0]["shape"] for (name, version), each in entries.items() if name == "two"}
    assert shapes == {"1": [2, 3], "2": [4, 5]}
    rows = _call(server, "--grpc", "models", "dummy", "--output", "csv").stdout.split("\n")
    assert rows[1] == 'dummy,1,READY,"b FP32 [1, 10]","a FP32 [1, 10]",'
    assert _call(server, "--grpc", "models", "nobody").exit_code == 1


@both_protocols
def test_models_shows_why_a_model_failed_to_load(server: ServedInThread, protocol: str) -> None:
    """With the reason of the server."""
    (entry,) = _outputs(_call(server, protocol, "models", "damaged", "--json"))
    assert entry["state"] != "READY"
    assert "cannot read the model" in entry["reason"]


def test_health_is_an_exit_code(server: ServedInThread) -> None:
    """0 is ready, 1 not ready, 2 unreachable; the protocol is found by the port."""
    (port,) = free_ports(1)
    for url in (server.grpc, server.rest, server.http):
        done = run_command("health", "--model", "dummy", "--url", url)
        assert (done.exit_code, done.stdout) == (0, "ready\n"), done.stderr
    assert run_command("health", "--live", "--grpc", "--url", server.grpc).exit_code == 0
    assert run_command("health", "--model", "nobody", "--url", server.rest).exit_code == 1
    assert run_command("health", "--url", f"127.0.0.1:{port}").exit_code == 2


# Graphs, handlers and pipelines of Ops.


@both_protocols
@pytest.mark.parametrize(
    ("given", "answered"), [('{"first_number": [3]}', [6]), ("[1, 2.5]", [4.0, 5.5]), ('{"first_number": 7}', [10])]
)
def test_numbers_for_a_graph_get_a_type_by_their_values(
    server: ServedInThread, protocol: str, given: str, answered: list[float]
) -> None:
    """The metadata of a graph has no types; a single input needs no name."""
    assert _outputs(_infer(server, protocol, "incrementer", "-", stdin=given)) == {"last_number": answered}


def test_an_array_for_a_graph_keeps_its_type(server: ServedInThread, tmp_path: Path) -> None:
    """Over gRPC."""
    np.save(tmp_path / "x.npy", np.array([[250, 1]], np.uint8))
    answer = tmp_path / "y.npy"
    done = _infer(server, "--grpc", "incrementer", str(tmp_path / "x.npy"), "--output", str(answer))
    assert done.exit_code == 0, done.stderr
    saved = np.load(answer)
    assert (saved.dtype, saved.tolist()) == (np.uint8, [[253, 4]])


@both_protocols
def test_the_stream_of_a_graph_is_joined(server: ServedInThread, protocol: str) -> None:
    """All pieces are in the answer, and standard error has a note."""
    done = _infer(server, protocol, "counter_stream", "text=a few words")
    assert _outputs(done) == {"word": ["afewwords"], "count": [3]}
    assert "counter_stream streams: 3 pieces, put together here" in done.stderr


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ('{"image": [1]}', ["missing: labels"]),
        (
            '{"image": [1, "a"], "labels": {}}',
            [
                'input "image": expected numbers, truth values or texts, got texts and numbers together',
                'input "labels"',
            ],
        ),
    ],
)
def test_all_wrong_inputs_of_a_graph_are_reported(server: ServedInThread, given: str, texts: list[str]) -> None:
    """Missing names, and values without a type."""
    done = _infer(server, "--grpc", "labels_image", "-", stdin=given)
    assert done.exit_code == 1
    assert [text for text in texts if text not in done.stderr] == []


def test_one_document_holds_several_inputs_of_a_graph(server: ServedInThread) -> None:
    """Texts and numbers."""
    given = json.dumps({"labels": "gold,navy", "image": [[[0, 0, 90]]]})
    assert _outputs(_infer(server, "--grpc", "labels_image", "-", stdin=given)) == {"result": ["navy"]}


@both_protocols
def test_a_pipeline_of_ops_is_called_by_the_given_names(server: ServedInThread, protocol: str) -> None:
    """Its metadata has no inputs."""
    width = _outputs(_infer(server, protocol, "diamond", "x=6.3,3.3,6.0"))["width"]
    assert 1 < float(width[0]) < 3


def test_a_handler_gets_the_file_over_http(server: ServedInThread, tmp_path: Path) -> None:
    """A refusal has the text of the handler; KServe's gRPC cannot call a handler."""
    numbers = tmp_path / "numbers.json"
    numbers.write_text("[1, 2, 3.5]")
    assert _outputs(_infer(server, "--rest", "adder", str(numbers))) == {"sum": 6.5}
    done = _infer(server, "--rest", "adder", "-", stdin='{"a": 1}')
    assert (done.exit_code, done.stdout) == (1, "")
    assert "expected a list of numbers" in done.stderr
    done = _infer(server, "--grpc", "adder", "-", stdin="{}")
    assert (done.exit_code, done.stderr) == (
        1,
        "error: 'adder' is called over HTTP, and not over KServe's gRPC: use REST\n",
    )
