"""`ovms sequence run` as people and scripts use it."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import ir
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, run_ovms, serving

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """Serve a model that sums up, one that fails on some shapes, and one without sequences."""
    root = tmp_path_factory.mktemp("models")
    models = {"sum": ir.accumulator(), "reshape": ir.reshape_by_data(), "plain": ir.dummy((1, 2))}
    entries: list[dict[str, Any]] = []
    for name, model in models.items():
        entries.append({"name": name, "base_path": str(ir.save(model, root, name)), "stateful": name != "plain"})
    config = root / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": entry} for entry in entries]}))
    with serving("--config_path", str(config)) as running:
        yield running


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Ten rows of two numbers."""
    np.save(tmp_path / "rows.npy", np.arange(20, dtype=np.float32).reshape(10, 2))
    return str(tmp_path / "rows.npy")


def _command(server: OvmsProcess, *options: str) -> list[str]:
    model = () if "--model" in options else ("--model", "sum")
    return ["sequence", "run", *model, *options, "--url", server.rest if "--rest" in options else server.grpc]


def _ask(server: OvmsProcess, *options: str) -> subprocess.CompletedProcess[str]:
    return run_ovms(*_command(server, *options))


def _alive(server: OvmsProcess, model: str = "sum") -> list[int]:
    listed = server.get(f"/v2/models/{model}/sequences").json()["sequences"]
    return [each["id"] for each in listed]


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_a_sequence_is_started_gone_through_and_ended(
    server: OvmsProcess, rows: str, tmp_path: Path, protocol: str
) -> None:
    """Sums grow from row to row, are saved, and nothing is left on the server."""
    saved = tmp_path / "sums.npz"
    answer = _ask(server, "--input", rows, "--output", str(saved), "--join", "0", protocol)
    assert answer.returncode == 0, answer.stderr
    np.testing.assert_array_equal(np.load(saved)["y"], np.cumsum(np.load(rows), axis=0))
    assert "has ended" in answer.stdout
    assert "10 steps of 1" in answer.stderr
    assert "steps/s" not in answer.stderr
    assert _alive(server) == []


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_the_largest_id_and_lines_of_json(server: OvmsProcess, rows: str, protocol: str) -> None:
    """Ids of 64 bits go over both protocols; each step is a line."""
    number = 2**64 - 1
    options = ("--model", "sum", "--input", "-", "--json", "--sequence_id", str(number))
    command = [sys.executable, "-m", "ovms_cli", *_command(server, *options, protocol)]
    with Path(rows).open("rb") as given:
        answer = subprocess.run(command, check=False, stdin=given, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [line["step"] for line in lines] == list(range(10))
    assert {line["sequence_id"] for line in lines} == {number}
    assert lines[2]["outputs"] == {"y": [[6.0, 9.0]]}


def test_one_step_starts_and_ends(server: OvmsProcess, tmp_path: Path) -> None:
    """A sequence of one request is a sequence."""
    np.save(tmp_path / "one.npy", np.array([3, 4], np.float32))
    answer = _ask(server, "--input", str(tmp_path / "one.npy"), "--json")
    assert json.loads(answer.stdout)["outputs"] == {"y": [[3.0, 4.0]]}
    assert _alive(server) == []


@pytest.mark.slow
def test_refusals_have_exit_codes_and_reasons(server: OvmsProcess, rows: str, tmp_path: Path) -> None:
    """1 means no, 2 means nobody is there, 64 means a wrong command line; never a traceback."""
    np.save(tmp_path / "complex.npy", np.zeros((1, 2), np.complex64))
    (port,) = free_ports(1)
    for code, text, options in (
        (1, "Model with requested name is not found", ("--model", "nobody", "--input", rows)),
        (1, '"plain" keeps no sequences', ("--model", "plain", "--input", rows)),
        (1, "nowhere.npy: No such file", ("--input", "nowhere.npy")),
        (1, 'no input is called "z"; the model takes x', ("--input", f"z={tmp_path}/none.npy")),
        (1, "expected FP32, got complex64", ("--input", str(tmp_path / "complex.npy"))),
        (64, "--axis 2 is out of range: the model takes x [1, 2]", ("--input", rows, "--axis", "2")),
        (64, 'input "x" takes 1 along axis 0, and not 3', ("--input", rows, "--chunk", "3")),
        (64, "a file ending in", ("--input", rows, "--output", "sums.txt")),
        (64, "give --output, too", ("--input", rows, "--join", "0")),
        (64, "", ("--input", rows, "--sequence_id", "0")),
        (64, "", ("--input", rows, "--chunk", "0")),
        (64, "", ()),
    ):
        answer = _ask(server, *options)
        assert answer.returncode == code, (options, answer.stderr)
        assert text in answer.stderr
        assert "Traceback" not in answer.stderr
    absent = run_ovms("sequence", "run", "--model", "sum", "--input", rows, "--url", f"127.0.0.1:{port}")
    assert absent.returncode == 2


def test_a_sequence_of_another_is_left_alone(server: OvmsProcess, rows: str) -> None:
    """An id that is taken is refused, and the sequence that has it goes on."""
    control = {"name": "sequence_control_input", "datatype": "UINT32", "shape": [1]}
    number = {"name": "sequence_id", "datatype": "UINT64", "shape": [1], "data": [5]}
    given = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 1]}
    path = f"{server.rest}/v2/models/sum/infer"
    assert httpx.post(path, json={"inputs": [given, number, {**control, "data": [1]}]}, timeout=10).is_success
    refused = _ask(server, "--input", rows, "--sequence_id", "5")
    assert refused.returncode == 1
    assert "step 1 of 10 in sequence 5: Sequence with provided ID already exists" in refused.stderr
    assert _alive(server) == [5]
    assert httpx.post(path, json={"inputs": [given, number, {**control, "data": [2]}]}, timeout=10).is_success


@pytest.mark.parametrize("shapes", [[(2, 2), (4, 1), (3, 3)], [(2, 2), (4, 1), (3, 3), (1, 4)]])
def test_a_step_that_fails_ends_the_sequence(
    server: OvmsProcess, tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    """Whether it is the last one or not, the reason is told with its step, and nothing is left."""
    np.save(tmp_path / "shape.npy", np.array(shapes, np.int64).reshape(-1))
    np.save(tmp_path / "numbers.npy", np.arange(4, dtype=np.float32))
    given = [f"--input={name}={tmp_path}/{name}.npy" for name in ("shape", "numbers")]
    answer = _ask(server, "--model", "reshape", *given, "--json")
    assert answer.returncode == 1
    assert len(answer.stdout.splitlines()) == 2
    assert f"step 3 of {len(shapes)} in sequence" in answer.stderr
    assert "may be left" not in answer.stderr
    assert _alive(server, "reshape") == []


def _many(tmp_path: Path) -> str:
    np.save(tmp_path / "many.npy", np.ones((1_000_000, 2), np.float32))
    return str(tmp_path / "many.npy")


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_ctrl_c_ends_the_sequence(server: OvmsProcess, tmp_path: Path, protocol: str) -> None:
    """In the middle of a million steps; the exit code says so."""
    command = _command(server, "--input", _many(tmp_path), "--json", protocol)
    with subprocess.Popen(
        [sys.executable, "-m", "ovms_cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(20):
            process.stdout.readline()
        assert len(_alive(server)) == 1
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert _alive(server) == []


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, protocol: str) -> None:
    """When the server hangs, the first one is answered with what is waited for, the second one ends the command."""
    base = ir.save(ir.accumulator(), tmp_path, "sum")
    with serving("--model_name", "sum", "--model_path", str(base), "--stateful") as server:
        command = _command(server, "--input", _many(tmp_path), "--json", "--sequence_id", "7", protocol)
        with subprocess.Popen(
            [sys.executable, "-m", "ovms_cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            server.process.send_signal(signal.SIGSTOP)
            # What the server had answered before it was stopped ends here, and the command waits.
            reader = threading.Thread(target=process.stdout.read, daemon=True)
            reader.start()
            process.send_signal(signal.SIGINT)
            while "Ctrl-C again" not in (line := process.stderr.readline()):
                assert line, "the command ended at the first Ctrl-C"
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            told = process.stderr.read()
            reader.join(10)
        server.process.send_signal(signal.SIGCONT)
    assert "sequence 7 may be left on the server until it is idle for long enough: interrupted" in told
    assert "Traceback" not in told


def test_a_server_that_goes_away_is_said(tmp_path: Path) -> None:
    """The exit code is that of a server that does not answer; the sequence cannot be ended."""
    base = ir.save(ir.accumulator(), tmp_path, "sum")
    with serving("--model_name", "sum", "--model_path", str(base), "--stateful") as server:
        command = _command(server, "--input", _many(tmp_path), "--json")
        with subprocess.Popen(
            [sys.executable, "-m", "ovms_cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            server.process.kill()
            _, told = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "may be left on the server" in told
    assert "is the server running?" in told


def test_a_reader_that_leaves_ends_the_sequence(server: OvmsProcess, tmp_path: Path) -> None:
    """As `head` does."""
    command = _command(server, "--input", _many(tmp_path), "--json")
    with subprocess.Popen(
        [sys.executable, "-m", "ovms_cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 1
        assert "Traceback" not in process.stderr.read()
    assert _alive(server) == []


def test_a_bar_is_shown_to_people(server: OvmsProcess, tmp_path: Path) -> None:
    """On a terminal, steps and their speed are shown while they are made."""
    command = [sys.executable, "-m", "ovms_cli", *_command(server, "--input", _many(tmp_path))]
    leader, follower = pty.openpty()
    with subprocess.Popen(command, stdin=follower, stdout=subprocess.DEVNULL, stderr=follower) as process:
        os.close(follower)
        shown = b""
        while b"steps/s" not in shown:
            shown += os.read(leader, 4096)
        assert b"/1000000" in shown
        process.send_signal(signal.SIGINT)
        _drain(leader)
        assert process.wait(20) == 130
    os.close(leader)
    assert _alive(server) == []


def _drain(leader: int) -> None:
    """Read a terminal to its end."""
    with io.FileIO(os.dup(leader)) as terminal:
        try:
            while terminal.read(4096):
                pass
        except OSError:
            # The other end is closed.
            return
