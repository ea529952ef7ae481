"""`ovms infer` calls what is no model too: graphs, pipelines of Ops and handlers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ovmstrio_samples
from tests.support import ir
from tests.support.processes import OvmsProcess, environment, run_ovms, serving

pytestmark = pytest.mark.e2e

SAMPLES = Path(ovmstrio_samples.__file__).parent
GRAPHS = ("incrementer", "counter_stream", "labels_image")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """Serve graphs, a handler and a pipeline of Ops of the samples, from a copy of them."""
    root = tmp_path_factory.mktemp("services")
    for name in (*GRAPHS, "handler_iris", "ops_diamond"):
        shutil.copytree(
            SAMPLES / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "PipelineServingLogs")
        )
    sums = {"name": "sums", "base_path": str(ir.save(ir.accumulator(), root, "sums")), "stateful": True}
    config = {
        "model_config_list": [{"config": sums}],
        "mediapipe_config_list": [{"name": name, "base_path": str(root / name)} for name in GRAPHS],
        "handler_config_list": [{"name": "iris", "path": str(root / "handler_iris")}],
        "op_pipeline_config_list": [{"name": "diamond", "path": str(root / "ops_diamond" / "config.yml")}],
    }
    (root / "config.json").write_text(json.dumps(config))
    with serving("--config_path", str(root / "config.json"), log=root / "log") as running:
        yield running


def ask(server: OvmsProcess, protocol: str, *arguments: str, piped: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command with JSON as its output, and with a text on its standard input."""
    url = server.rest if protocol == "--rest" else server.grpc
    command = [sys.executable, "-m", "ovms_cli", "infer", protocol, "--url", url, "--output", "json", *arguments]
    return subprocess.run(
        command, input=piped, capture_output=True, text=True, check=False, timeout=60, env=environment()
    )


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
@pytest.mark.parametrize(("given", "answered"), [("[3]", [6]), ("[1, 2.5]", [4.0, 5.5]), ("7", [10])])
def test_numbers_for_a_graph_have_the_type_that_they_look_like(
    server: OvmsProcess, protocol: str, given: str, answered: list[float]
) -> None:
    """A graph's metadata names no types."""
    done = ask(server, protocol, "--model", "incrementer", "--input", "-", piped=f'{{"first_number": {given}}}')
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["last_number"] == answered


def test_a_graph_is_called_with_a_list_on_standard_input(server: OvmsProcess) -> None:
    """No name is needed where there is but one input."""
    done = ask(server, "--grpc", "--model", "incrementer", "--input", "-", piped="[3]")
    assert (done.returncode, done.stdout) == (0, '{"last_number": [6]}\n'), done.stderr


def test_an_array_for_a_graph_keeps_its_type(server: OvmsProcess, tmp_path: Path) -> None:
    """Over gRPC any type goes as it is."""
    np.save(tmp_path / "x.npy", np.array([[250, 1]], np.uint8))
    answer = tmp_path / "y.npy"
    done = ask(server, "--grpc", "--model", "incrementer", "--input", str(tmp_path / "x.npy"), "--output", str(answer))
    assert done.returncode == 0, done.stderr
    saved = np.load(answer)
    assert (saved.dtype, saved.tolist()) == (np.uint8, [[253, 4]])


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_what_a_graph_streams_is_put_together_and_said(server: OvmsProcess, protocol: str) -> None:
    """Not a piece is lost: words are joined, and standard error tells how to see them come."""
    done = ask(server, protocol, "--model", "counter_stream", "--input", "text=a few words")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"word": ["afewwords"], "count": [3]}
    assert "counter_stream streams: 3 pieces, put together here" in done.stderr


def test_several_inputs_come_in_one_document(server: OvmsProcess) -> None:
    """Texts go as texts, numbers as numbers."""
    given = json.dumps({"labels": "gold,navy", "image": [[[0, 0, 90]]]})
    done = ask(server, "--grpc", "--model", "labels_image", "--input", "-", piped=given)
    assert json.loads(done.stdout) == {"result": ["navy"]}, done.stderr


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_a_model_of_sequences_says_how_it_is_called(server: OvmsProcess, protocol: str) -> None:
    """Its refusal has the server's words, and the command that it needs is told beside it."""
    done = ask(server, protocol, "--model", "sums", "--input", "-", piped="[[1, 2]]")
    assert (done.returncode, "Sequence ID has not been provided" in done.stderr) == (1, True)
    assert "sums serves sequences: ovms sequence run --model sums" in done.stderr


def test_all_that_is_wrong_with_a_graph_s_inputs_is_told(server: OvmsProcess) -> None:
    """Missing names and values without a type, each in one round."""
    done = ask(server, "--grpc", "--model", "labels_image", "--input", "-", piped='{"image": [1]}')
    assert (done.returncode, "missing: labels" in done.stderr) == (1, True)
    done = ask(server, "--grpc", "--model", "labels_image", "--input", "-", piped='{"image": [1, "a"], "labels": {}}')
    assert done.returncode == 1
    assert 'input "image": expected numbers, truth values or texts, got texts and numbers together' in done.stderr
    assert 'input "labels"' in done.stderr


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_a_pipeline_of_ops_is_called_by_the_names_that_are_given(server: OvmsProcess, protocol: str) -> None:
    """It names no inputs itself."""
    sizes = "6.3,3.3,6.0"
    done = ask(server, protocol, "--model", "diamond", "--input", f"x={sizes}")
    assert done.returncode == 0, done.stderr
    assert 1 < float(json.loads(done.stdout)["width"][0]) < 3


def test_a_handler_gets_the_file_and_its_answer_is_shown(server: OvmsProcess, tmp_path: Path) -> None:
    """Over REST, below its name; what it refuses is told in its words."""
    flower = tmp_path / "flower.json"
    flower.write_text('{"sepal_length": 5.1, "sepal_width": 3.5, "petal_length": 1.4, "petal_width": 0.2}')
    done = ask(server, "--rest", "--model", "iris", "--input", str(flower))
    assert json.loads(done.stdout) == {"species": "setosa", "version": "latest"}, done.stderr
    done = ask(server, "--rest", "--model", "iris", "--input", "-", piped='{"sepal_length": 5.1}')
    assert (done.returncode, done.stdout) == (1, "")
    assert "expected an object of numbers" in done.stderr


def test_a_handler_over_grpc_is_refused_with_the_way_out(server: OvmsProcess) -> None:
    """KServe's gRPC has no call for a body."""
    done = ask(server, "--grpc", "--model", "iris", "--input", "-", piped="{}")
    assert (done.returncode, done.stderr) == (
        1,
        "error: 'iris' is called over HTTP, and not over KServe's gRPC: use REST\n",
    )


def test_a_file_that_is_not_there_is_no_text(server: OvmsProcess) -> None:
    """A misspelt name of a file of arrays is not sent."""
    done = run_ovms("infer", "--model", "counter_stream", "--input", "nowhere.npy", "--url", server.grpc)
    assert (done.returncode, done.stderr) == (1, "error: nowhere.npy: No such file or directory\n")
