"""`ovms infer`, `models` and `health` as scripts use them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import ir
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, run_ovms, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """Serve a model that adds one."""
    base = ir.save(ir.dummy(), tmp_path_factory.mktemp("models"), "dummy")
    options = (
        "--model_name",
        "dummy",
        "--model_path",
        str(base),
        "--plugin_config",
        '{"INFERENCE_PRECISION_HINT":"f32"}',
    )
    with serving(*options) as running:
        yield running


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OvmsProcess]:
    """Serve a model of two versions that differ, one that takes pixels, and one whose file is damaged."""
    root = tmp_path_factory.mktemp("troubled")
    for version, shape in ((1, (2, 3)), (2, (4, 5))):
        ir.save(ir.passthrough("FP32", shape), root, "two", version)
    grey = ir.passthrough("FP32", (1, 4, 4, 1), layout="NHWC", input_name="image", output_name="pixels")
    ir.save(grey, root, "pixels")
    damaged = ir.save(ir.dummy(), root, "damaged") / "1" / "model.xml"
    damaged.write_text("<net")
    entries = [{"name": name, "base_path": str(root / name)} for name in ("two", "pixels", "damaged")]
    entries[0]["model_version_policy"] = {"all": {}}  # type: ignore[assignment]
    config = root / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": entry} for entry in entries]}))
    with serving("--config_path", str(config), ready=False) as running:
        running.wait_live()
        running._wait("/v2/models/two/versions/1/ready")
        running._wait("/v2/models/pixels/ready")
        yield running


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Ten numbers."""
    path = tmp_path / "b.npy"
    np.save(path, np.arange(10, dtype=np.float32))
    return str(path)


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_an_answer_is_printed_as_json(server: OvmsProcess, file: str, protocol: str) -> None:
    """The answer goes to standard output alone, so that it can be piped."""
    url = server.rest if protocol == "--rest" else server.grpc
    done = run_ovms("infer", "--model", "dummy", "--input", file, "--output", "json", protocol, "--url", url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"a": [[float(value) for value in range(1, 11)]]}
    assert "batch axis" in done.stderr


def test_an_answer_is_saved_and_latencies_are_summed_up(server: OvmsProcess, file: str, tmp_path: Path) -> None:
    """An array in a file is the answer; the summary goes to people."""
    saved = tmp_path / "a.npy"
    target = ("--output", str(saved), "--repeat", "5", "--url", server.grpc)
    done = run_ovms("infer", "--model", "dummy", "--input", f"b={file}", *target)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(saved), np.arange(1, 11, dtype=np.float32)[None])
    assert "5 calls" in done.stderr
    assert "median" in done.stderr


def test_refusals_and_absent_servers_have_exit_codes_of_their_own(server: OvmsProcess, file: str) -> None:
    """1 means no, 2 means nobody is there, 64 means a wrong command line; never a traceback."""
    (port,) = free_ports(1)
    for code, options in (
        (1, ("--model", "nobody", "--input", file, "--url", server.grpc)),
        (1, ("--model", "dummy", "--input", "nowhere.npy", "--url", server.grpc)),
        (2, ("--model", "dummy", "--input", file, "--url", f"127.0.0.1:{port}")),
        (64, ("--model", "dummy", "--input", file, "--output", "answer.txt")),
        (64, ("--model", "dummy", "--url", server.grpc)),
        (64, ("--input", file)),
        (64, ("--model", "dummy", "--input", file, "--url", "127.0.0.1:99999")),
        (64, ("--model", "dummy", "--input", file, "--timeout", "inf")),
        (64, ("--model", "dummy", "--input", file, "--scale", "2")),
    ):
        done = run_ovms("infer", *options)
        assert done.returncode == code, (options, done.stderr)
        assert "Traceback" not in done.stderr


def test_models_are_listed_with_what_they_take(server: OvmsProcess) -> None:
    """As JSON for programs, and refused for a name that is not there."""
    done = run_ovms("models", "--json", "--url", server.grpc)
    (entry,) = json.loads(done.stdout)
    assert (entry["name"], entry["version"], entry["state"]) == ("dummy", "1", "READY")
    assert entry["inputs"] == [{"name": "b", "datatype": "FP32", "shape": [1, 10]}]
    assert run_ovms("models", "nobody", "--url", server.grpc).returncode == 1


def test_health_is_an_exit_code(server: OvmsProcess) -> None:
    """0 ready, 1 not, 2 nobody."""
    (port,) = free_ports(1)
    assert run_ovms("health", "--url", server.rest).returncode == 0
    assert run_ovms("health", "--live", "--grpc", "--url", server.grpc).returncode == 0
    assert run_ovms("health", "--model", "nobody", "--url", server.rest).returncode == 1
    assert run_ovms("health", "--url", f"127.0.0.1:{port}").returncode == 2


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_a_model_that_failed_to_load_is_shown_with_the_reason(troubled: OvmsProcess, protocol: str) -> None:
    """Who asks what is wrong with a model is told."""
    url = troubled.rest if protocol == "--rest" else troubled.grpc
    done = run_ovms("models", "damaged", "--json", protocol, "--url", url)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)
    assert entry["state"] != "READY"
    assert "cannot read the model" in entry["reason"]


def test_each_version_is_shown_with_its_own_shapes(troubled: OvmsProcess) -> None:
    """Versions of one model may differ in what they take."""
    done = run_ovms("models", "two", "--json", "--url", troubled.grpc)
    shapes = {entry["version"]: entry["inputs"][0]["shape"] for entry in json.loads(done.stdout)}
    assert shapes == {"1": [2, 3], "2": [4, 5]}


@pytest.mark.parametrize("protocol", ["--grpc", "--rest"])
def test_an_encoded_image_is_decoded_by_the_server(troubled: OvmsProcess, tmp_path: Path, protocol: str) -> None:
    """It gives the levels of grey in the size of the input, which takes no bytes otherwise."""
    picture = tmp_path / "i.png"
    Image.new("L", (9, 7), 200).save(picture)
    url = troubled.rest if protocol == "--rest" else troubled.grpc
    options = ("--input", str(picture), "--encoded", "--output", "json", protocol, "--url", url)
    done = run_ovms("infer", "--model", "pixels", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pixels"] == np.full((1, 4, 4, 1), 200.0).tolist()


def test_a_certificate_without_its_key_is_a_wrong_command_line(server: OvmsProcess, file: str) -> None:
    """The process is not taken down by a library that wants both."""
    done = run_ovms("infer", "--model", "dummy", "--input", file, "--url", server.grpc, "--cert", file)
    assert (done.returncode, "belong together" in done.stderr) == (64, True)


def test_ctrl_c_ends_quietly(server: OvmsProcess, file: str) -> None:
    """The exit code is that of an interrupted program, and nothing more is said."""
    command = [sys.executable, "-m", "ovms_cli", "infer", "--model", "dummy", "--input", file, "--url", server.grpc]
    with subprocess.Popen([*command, "--repeat", "10000000"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # The note on the batch axis: the calls begin.
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == ""
