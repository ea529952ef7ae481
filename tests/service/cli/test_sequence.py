"""``ovms sequence run`` against stateful models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import CommandResult, run_command
from tests.support.ports import free_ports
from tests.support.served_in_thread import ServedInThread

both_protocols = pytest.mark.parametrize("protocol", ["--grpc", "--rest"])


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Write ten rows of two numbers to a file."""
    np.save(tmp_path / "rows.npy", np.arange(20, dtype=np.float32).reshape(10, 2))
    return str(tmp_path / "rows.npy")


def _run(server: ServedInThread, *options: str, stdin: bytes = b"") -> CommandResult:
    model = () if "--model" in options else ("--model", "sum")
    url = server.rest if "--rest" in options else server.grpc
    return run_command("sequence", "run", *model, *options, "--url", url, stdin=stdin)


def _open_sequences(server: ServedInThread, model: str = "sum") -> list[int]:
    listed = server.ask("GET", f"/v2/models/{model}/sequences").json()["sequences"]
    return [each["id"] for each in listed]


@both_protocols
def test_a_sequence_is_run_to_its_end(server: ServedInThread, rows: str, tmp_path: Path, protocol: str) -> None:
    """The sums of the rows are saved, and the sequence is closed on the server."""
    saved = tmp_path / "sums.npz"
    answer = _run(server, "--input", rows, "--output", str(saved), "--join", "0", protocol)
    assert answer.exit_code == 0, answer.stderr
    np.testing.assert_array_equal(np.load(saved)["y"], np.cumsum(np.load(rows), axis=0))
    assert "has ended" in answer.stdout
    assert "10 steps of 1" in answer.stderr
    assert "steps/s" not in answer.stderr
    assert _open_sequences(server) == []


@both_protocols
def test_steps_are_lines_of_json(server: ServedInThread, rows: str, protocol: str) -> None:
    """The largest id of 64 bits passes over both protocols."""
    options = ("--input", "-", "--json", "--sequence_id", str(2**64 - 1), protocol)
    answer = _run(server, *options, stdin=Path(rows).read_bytes())
    assert answer.exit_code == 0, answer.stderr
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [(line["step"], line["sequence_id"]) for line in lines] == [(step, 2**64 - 1) for step in range(10)]
    assert lines[2]["outputs"] == {"y": [[6.0, 9.0]]}


def test_a_sequence_may_have_one_step(server: ServedInThread, tmp_path: Path) -> None:
    """The step starts and ends the sequence."""
    np.save(tmp_path / "one.npy", np.array([3, 4], np.float32))
    answer = _run(server, "--input", str(tmp_path / "one.npy"), "--json")
    assert json.loads(answer.stdout)["outputs"] == {"y": [[3.0, 4.0]]}
    assert _open_sequences(server) == []


@pytest.mark.parametrize(
    ("code", "text", "options"),
    [
        (1, "Model with requested name is not found", ("--model", "nobody")),
        (1, '"dummy" keeps no sequences', ("--model", "dummy", "--input", "ten.npy")),
        (1, "nowhere.npy: No such file", ("--input", "nowhere.npy")),
        (1, 'no input is called "z"; the model takes x', ("--input", "z=none.npy")),
        (1, "expected FP32, got complex64", ("--input", "complex.npy")),
        (2, "is the server running?", ("--url", "free")),
        (64, "--axis 2 is out of range: the model takes x [1, 2]", ("--axis", "2")),
        (64, "a file ending in", ("--output", "sums.txt")),
        (64, "give --output, too", ("--join", "0")),
        (64, "--sequence_id", ("--sequence_id", "0")),
        (64, "--chunk", ("--chunk", "0")),
    ],
)
def test_a_refusal_has_an_exit_code_and_a_reason(
    server: ServedInThread, rows: str, command_folder: Path, code: int, text: str, options: tuple[str, ...]
) -> None:
    """1 is a refusal, 2 an unreachable server, 64 a wrong command line."""
    np.save("complex.npy", np.zeros((1, 2), np.complex64))
    np.save("ten.npy", np.zeros((3, 10), np.float32))
    (port,) = free_ports(1)
    given = [f"127.0.0.1:{port}" if each == "free" else each for each in options]
    defaults = [("--input", rows), ("--model", "sum"), ("--url", server.grpc)]
    given += [text for pair in defaults if pair[0] not in given for text in pair]
    answer = run_command("sequence", "run", *given)
    assert answer.exit_code == code, answer.stderr
    assert text in answer.stderr


def test_an_id_in_use_is_refused(server: ServedInThread, rows: str) -> None:
    """The sequence that has the id goes on."""
    given = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 1]}

    def step(**parameters: object) -> bool:
        document = {"inputs": [given], "parameters": {"sequence_id": 5, **parameters}}
        return server.ask("POST", "/v2/models/sum/infer", json=document).is_success

    assert step(sequence_start=True)
    refused = _run(server, "--input", rows, "--sequence_id", "5")
    assert refused.exit_code == 1
    assert "step 1 of 10 in sequence 5: Sequence with provided ID already exists" in refused.stderr
    assert _open_sequences(server) == [5]
    assert step(sequence_end=True)


@pytest.mark.parametrize("shapes", [[(2, 2), (4, 1), (3, 3)], [(2, 2), (4, 1), (3, 3), (1, 4)]])
def test_a_failed_step_ends_the_sequence(server: ServedInThread, tmp_path: Path, shapes: list[tuple[int, int]]) -> None:
    """The last step or another one; the error names the step."""
    np.save(tmp_path / "shape.npy", np.array(shapes, np.int64).reshape(-1))
    np.save(tmp_path / "numbers.npy", np.arange(4, dtype=np.float32))
    given = [f"--input={name}={tmp_path}/{name}.npy" for name in ("shape", "numbers")]
    answer = _run(server, "--model", "reshape", *given, "--json")
    assert answer.exit_code == 1
    assert len(answer.stdout.splitlines()) == 2
    assert f"step 3 of {len(shapes)} in sequence" in answer.stderr
    assert "may be left" not in answer.stderr
    assert _open_sequences(server, "reshape") == []
