"""``ovms migrate triton`` without a server: each case is one ``config.pbtxt`` with what it becomes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import CommandResult, run_command

pytestmark = pytest.mark.usefixtures("command_folder")

IO = 'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }'
ONNX = 'backend: "onnxruntime"'


def _add(name: str, text: str | None, *files: str) -> Path:
    folder = Path("repo", name)
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "config.pbtxt").write_text(text)
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"")
    return folder


def _migrate(*options: str) -> CommandResult:
    return run_command("migrate", "triton", "repo", *options)


def _report() -> dict[str, Any]:
    report: dict[str, Any] = json.loads(_migrate("--json", "--output", "out").stdout)
    return report


def _entry(name: str = "m") -> dict[str, Any]:
    written = json.loads(Path("out", "config.json").read_text())
    entries = [each["config"] for each in written["model_config_list"]]
    found: dict[str, Any] = next(each for each in entries if each.pop("name") == name)
    return found


def _notes(report: dict[str, Any], name: str = "m") -> dict[str, int | None]:
    """Return the line of each noted field."""
    model = next(each for each in report["models"] if each["name"] == name)
    return {each["path"]: each["line"] for each in model["notes"]}


CONVERTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a backend alone": (ONNX, {}),
    "a platform": ('platform: "onnxruntime_onnx"', {}),
    "an empty file": ("", {}),
    "comments and commas": (f"# first\n{ONNX}, # second\nmax_batch_size: 8;", {"batch_size": "1:8"}),
    "dims without a batch": (
        f'{ONNX} max_batch_size: 0 input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 1, 3, 224, 224 ] }} ]',
        {"shape": {"x": "(1,3,224,224)"}},
    ),
    "dims with a batch": (f"{ONNX} max_batch_size: 8 {IO}", {"shape": {"x": "(1:8,4)"}}),
    "a batch of one": (f"{ONNX} max_batch_size: 1 {IO}", {"shape": {"x": "(1,4)"}}),
    "dims of any size": (f'{ONNX} max_batch_size: 16 input {{ name: "x" dims: -1 dims: -1 }}', {"batch_size": "1:16"}),
    "dims of any size without a batch": (f'{ONNX} input {{ name: "x" dims: [ -1 ] }}', {}),
    "two inputs": (
        f'{ONNX} max_batch_size: 2 input [ {{ name: "a" dims: [ 3, -1 ] }}, {{ name: "b c" dims: 7 }} ]',
        {"shape": {"a": "(1:2,3,-1)", "b c": "(1:2,7)"}},
    ),
    "latest versions": (
        f"{ONNX} version_policy: {{ latest: {{ num_versions: 2 }} }}",
        {"model_version_policy": {"latest": {"num_versions": 2}}},
    ),
    "the latest version": (f"{ONNX} version_policy {{ latest {{ num_versions: 1 }} }}", {}),
    "all versions": (f"{ONNX} version_policy: {{ all {{ }}}}", {"model_version_policy": {"all": {}}}),
    "specific versions": (
        f"{ONNX} version_policy: {{ specific: {{ versions: [1,3]}}}}",
        {"model_version_policy": {"specific": {"versions": [1, 3]}}},
    ),
    "dynamic batching": (
        f"{ONNX} max_batch_size: 8 {IO} dynamic_batching {{ max_queue_delay_microseconds: 100 }}",
        {
            "shape": {"x": "(1:8,4)"},
            "batching": {"max_batch_size": 8, "batch_timeout_ms": 0.1, "eager": False},
        },
    ),
    "dynamic batching without a delay": (
        f"{ONNX} max_batch_size: 8 dynamic_batching {{ }}",
        {"batch_size": "1:8", "batching": {"max_batch_size": 8, "batch_timeout_ms": 0.0, "eager": True}},
    ),
    "a preferred size": (
        (
            f"{ONNX} max_batch_size: 8 dynamic_batching {{ preferred_batch_size: [ 4 ] "
            "max_queue_delay_microseconds: 5000 default_queue_policy { max_queue_size: 32 } }"
        ),
        {
            "batch_size": "1:8",
            "batching": {"max_batch_size": 4, "batch_timeout_ms": 5.0, "eager": False, "max_queue_size": 32},
        },
    ),
    "properties of OpenVINO": (
        (
            'backend: "onnxruntime" parameters: [ { key: "NUM_STREAMS" value: { string_value: "4" } },'
            ' { key: "TARGET_DEVICE" value: { string_value: "AUTO" } },'
            ' { key: "HINT_BF16" value: { string_value: "YES" } } ]'
        ),
        {"target_device": "AUTO", "plugin_config": {"NUM_STREAMS": "4", "INFERENCE_PRECISION_HINT": "bf16"}},
    ),
    "threads of ONNX Runtime": (
        f'{ONNX} parameters {{ key: "intra_op_thread_count" value: {{ string_value: "2" }} }}',
        {"plugin_config": {"INFERENCE_NUM_THREADS": "2"}},
    ),
    "threads by default": (f'{ONNX} parameters {{ key: "intra_op_thread_count" value: {{ string_value: "0" }} }}', {}),
    "reshaped layers": (f'{ONNX} parameters {{ key: "RESHAPE_IO_LAYERS" value: {{ string_value: "yes" }} }}', {}),
    "one instance on the CPU": (f"{ONNX} instance_group [ {{ count: 1 kind: KIND_CPU }} ]", {}),
    "labels": (f'{ONNX} output {{ name: "y" dims: [ 4 ] label_filename: "labels.txt" }}', {}),
    "defaults written out": (
        f"{ONNX} response_cache {{ enable: false }} model_transaction_policy {{ decoupled: false }}",
        {},
    ),
    "angle brackets": (f"{ONNX} version_policy < all < > >", {"model_version_policy": {"all": {}}}),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_a_configuration_becomes_an_entry(case: str) -> None:
    text, expected = CONVERTED[case]
    folder = _add("m", text, "1/model.onnx", "3/model.onnx")
    report = _report()
    assert report["models"][0]["status"] == "converted", report
    assert _entry() == {"base_path": str(folder.resolve()), **expected}


NOTED = {
    "instance_group[0]": "instance_group [\n { count: 4 } ]",
    "input[0].reshape": 'input { name: "x" dims: [ 1 ]\n reshape: { shape: [ ] } }',
    "input[0].optional": 'input { name: "x" dims: [ 1 ]\n optional: true }',
    "output[0].label_filename": 'output { name: "y" dims: [ 1 ]\n label_filename: "names.txt" }',
    "optimization": (
        '\noptimization { execution_accelerators { gpu_execution_accelerator : [ { name : "tensorrt"'
        ' parameters { key: "precision_mode" value: "FP16" }} ] } }'
    ),
    "model_warmup[0]": 'model_warmup [\n { name: "a" batch_size: 1 inputs: { key: "x" value: { zero_data: true } } } ]',
    "response_cache": "\nresponse_cache { enable: true }",
    "parameters[0]": '\nparameters { key: "execution_mode" value: { string_value: "0" } }',
    "dynamic_batching.preserve_ordering": "max_batch_size: 4 dynamic_batching {\n preserve_ordering: true }",
    "dynamic_batching.default_queue_policy.timeout_action": (
        "max_batch_size: 4 dynamic_batching { default_queue_policy {\n timeout_action: DELAY } }"
    ),
    "dynamic_batching.preferred_batch_size": (
        "max_batch_size: 8 dynamic_batching {\n preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 100 }"
    ),
    "dynamic_batching": "\ndynamic_batching { }",
    "model_transaction_policy": "\nmodel_transaction_policy { decoupled: True }",
    "metric_tags[0]": '\nmetric_tags { key: "a" value: "b" }',
}


@pytest.mark.parametrize("path", NOTED)
def test_a_field_without_counterpart_is_noted_with_its_line(path: str) -> None:
    _add("m", f"{ONNX} {NOTED[path]}", "1/model.onnx")
    report = _report()
    assert report["models"][0]["status"] == "converted with notes"
    assert _notes(report) == {path: 2}


INVALID = {
    "unclosed message": (f'{ONNX}\ninput [ {{ name: "x" ', 2),
    "unterminated string": ('backend: "onnx\n', 1),
    "unknown field": (f"{ONNX}\nmax_batch: 8", 2),
    "unknown field of an input": (f'{ONNX}\ninput {{\n  name: "x"\n  datatype: TYPE_FP32\n}}', 4),
    "number for a text": ("backend: 4", 1),
    "text for a number": (f'{ONNX}\nmax_batch_size: "8"', 2),
    "unknown data type": (f'{ONNX}\ninput {{ name: "x"\n data_type: FP32 }}', 3),
    "field given twice": (f"{ONNX}\nmax_batch_size: 1\nmax_batch_size: 2", 3),
    "two schedulers": (f"{ONNX}\ndynamic_batching {{ }}\nsequence_batching {{ }}", 3),
    "other name": (f'{ONNX}\nname: "other"', 2),
    "negative batch": (f"{ONNX}\nmax_batch_size: -1", 2),
    "invalid size": (f'{ONNX}\ninput {{ name: "x"\n dims: [ 0 ] }}', 3),
    "preferred size above the maximum": (
        f"{ONNX} max_batch_size: 2\ndynamic_batching {{\n preferred_batch_size: [ 4 ] }}", 3,
    ),
    "not UTF-8": ("\udcff", None),
    "ensemble without steps": ('platform: "ensemble"\nensemble_scheduling { }', 2),
    "ensemble without a model": (
        ('ensemble_scheduling { step {\n input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }\n'
        'input { name: "x" dims: 1 } output { name: "y" dims: 1 }'), 1,
    ),
    "ensemble with a missing source": (
        ('ensemble_scheduling { step { model_name: "a"\n input_map { key: "x" value: "z" }\n'
        ' output_map { key: "y" value: "y" } } }\noutput { name: "y" dims: 1 }'), 2,
    ),
    "ensemble with an unused tensor": (
        ('ensemble_scheduling { step { model_name: "a" input_map { key: "x" value: "x" }\n'
        ' output_map { key: "y" value: "y" } output_map { key: "v" value: "v" } } }\n'
        'input { name: "x" dims: 1 } output { name: "y" dims: 1 }'), 2,
    ),
    "ensemble without a source of an output": (
        ('ensemble_scheduling { step { model_name: "a" input_map { key: "x" value: "x" }\n'
        ' output_map { key: "y" value: "y" } } }\ninput { name: "x" dims: 1 } output [ { name: "y" dims: 1 },\n'
        ' { name: "z" dims: 1 } ]'), 4,
    ),
    "ensemble that calls itself": (
        ('ensemble_scheduling { step {\n model_name: "m" input_map { key: "x" value: "x" }\n'
        ' output_map { key: "y" value: "y" } } }\ninput { name: "x" dims: 1 } output { name: "y" dims: 1 }'), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_configuration_is_an_error_with_its_line_and_nothing_is_written(case: str) -> None:
    text, line = INVALID[case]
    folder = _add("m", None, "1/model.onnx")
    (folder / "config.pbtxt").write_bytes(text.encode(errors="surrogateescape"))
    _add("sound", ONNX, "1/model.onnx")
    result = _migrate("--json", "--output", "out")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [(each["file"], each["line"]) for each in report["errors"]][:1] == [("repo/m/config.pbtxt", line)]
    assert not Path("out").exists()
    assert not report["ok"]


UNCONVERTED = {
    "pytorch_libtorch": "ovms prepare",
    "tensorrt_plan": "ONNX model",
    "python": "Python node",
    "dali": "Python node",
    "vllm": "text_model_config_list",
    "fil": "convert the trees to ONNX",
    "custom": "ONNX or OpenVINO IR",
}


@pytest.mark.parametrize("platform", UNCONVERTED)
def test_a_backend_without_counterpart_is_named_with_what_to_do(platform: str) -> None:
    _add("m", f'\nbackend: "{platform}"', "1/model.x")
    result = _migrate("--json", "--output", "out")
    assert result.exit_code == 1, result.stdout
    (model,) = json.loads(result.stdout)["models"]
    assert (model["status"], model["reason"]["line"]) == ("not converted", 2)
    assert UNCONVERTED[platform] in model["reason"]["suggestion"]


def test_an_unconverted_model_leaves_out_only_itself_and_its_ensembles() -> None:
    _add("pre", 'backend: "python"', "1/model.py")
    _add("net", ONNX, "1/model.onnx")
    step = 'step {{ model_name: "{}" input_map {{ key: "x" value: "{}" }} output_map {{ key: "y" value: "{}" }} }}'
    ends = 'input { name: "x" dims: 1 } output { name: "y" dims: 1 }'
    _add("all", f"ensemble_scheduling {{ {step.format('pre', 'x', 't')}\n{step.format('net', 't', 'y')} }} {ends}")
    _add("other", f"ensemble_scheduling {{ {step.format('gone', 'x', 'y')} }} {ends}")
    result = _migrate("--output", "out")
    assert result.exit_code == 0, result.output
    written = json.loads(Path("out/config.json").read_text())
    assert [each["config"]["name"] for each in written["model_config_list"]] == ["net"]
    assert "pipeline_config_list" not in written
    shown = " ".join(result.stdout.split())
    assert "the model 'pre' is not converted" in shown
    assert "there is no valid model 'gone'" in shown
    assert "all/config.pbtxt:1" in shown
    assert "1 model converted, 3 not converted" in shown


CALLS = {
    "an unknown input": ('name: "x" dims: [ 1 ]', '{ key: "z" value: "x" }', "'net' has no input 'z'"),
    "an unmapped input": ('name: "x" dims: [ 1 ] } input { name: "w" dims: [ 1 ]', '{ key: "x" value: "x" }', "'w'"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_step_that_does_not_fit_its_model_is_an_error(case: str) -> None:
    inputs, mapped, message = CALLS[case]
    _add("net", f"{ONNX} input {{ {inputs} }}", "1/model.onnx")
    step = f'step {{ model_name: "net"\n input_map {mapped} output_map {{ key: "y" value: "y" }} }}'
    ends = 'input { name: "x" dims: 1 } output { name: "y" dims: 1 }'
    _add("all", f"ensemble_scheduling {{ {step} }} {ends}")
    result = _migrate("--json", "--output", "out")
    assert result.exit_code == 1
    first, *_ = json.loads(result.stdout)["errors"]
    assert message in first["message"]
    assert first["line"] == 2


CHAINS = {
    "strings of another step": 'name: "x" data_type: TYPE_STRING dims: [ 1 ]',
    "reshapes a tensor": 'name: "x" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] }',
    "every input is required": 'name: "x" dims: [ 1 ] } input { name: "w" dims: [ 1 ] optional: true',
}


@pytest.mark.parametrize("reason", CHAINS)
def test_a_step_that_a_pipeline_cannot_run_leaves_the_ensemble_out(reason: str) -> None:
    _add("net", f"{ONNX} input {{ {CHAINS[reason]} }}", "1/model.onnx")
    _add("first", ONNX, "1/model.onnx")
    step = 'step {{ model_name: "{}" input_map {{ key: "x" value: "{}" }} output_map {{ key: "y" value: "{}" }} }}'
    ends = 'input { name: "x" dims: 1 } output { name: "y" dims: 1 }'
    _add("all", f"ensemble_scheduling {{ {step.format('first', 'x', 't')}\n{step.format('net', 't', 'y')} }} {ends}")
    report = _report()
    assert reason in next(each for each in report["models"] if each["name"] == "all")["reason"]["message"]
    assert "pipeline_config_list" not in json.loads(Path("out/config.json").read_text())


def test_a_name_that_is_not_utf8_is_not_converted() -> None:
    _add("m", ONNX, "1/model.onnx")
    _add("b\udcff", ONNX, "1/model.onnx")
    result = _migrate("--output", "out")
    assert result.exit_code == 0, result.output
    assert "rename the folder" in result.stdout
    assert _entry()
    report = json.loads(_migrate("--json", "--output", "again").stdout)
    assert [each["status"] for each in report["models"]] == ["not converted", "converted"]


def test_the_report_as_csv_has_a_row_for_each_note_and_each_model() -> None:
    _add("a", ONNX, "1/model.onnx")
    _add("b", f"{ONNX}\nresponse_cache {{ enable: true }} instance_group {{ count: 3 }}", "1/model.onnx")
    _add("c", 'backend: "python"', "1/model.py")
    header, *rows = csv.reader(io.StringIO(_migrate("--format", "csv", "--output", "out").stdout))
    assert header[:6] == ["model", "backend", "result", "file", "line", "path"]
    assert [(row[0], row[2], row[4], row[5]) for row in rows] == [
        ("a", "converted", "", ""),
        ("b", "converted with notes", "2", "response_cache"),
        ("b", "converted with notes", "2", "instance_group[0]"),
        ("c", "not converted", "1", "backend"),
    ]


def test_models_without_configuration_are_found_by_their_files() -> None:
    files = {
        "a": "1/model.onnx", "b": "1/model.xml", "c": "1/model.savedmodel/saved_model.pb", "d": "1/model.graphdef",
        "e": "1/model.pt", "f": "1/model.plan", "g": "1/model.py", "h": "1/readme.txt", "i": "readme.txt",
    }  # fmt: skip
    for name, file in files.items():
        _add(name, None, file)
    (Path("repo") / "b" / "1" / "model.bin").touch()
    report = _report()
    assert {each["name"]: (each["backend"], each["status"]) for each in report["models"]} == {
        "a": ("onnxruntime", "converted"),
        "b": ("openvino", "converted"),
        "c": ("tensorflow", "converted with notes"),
        "d": ("tensorflow", "converted with notes"),
        "e": ("pytorch", "not converted"),
        "f": ("tensorrt", "not converted"),
        "g": ("python", "not converted"),
        "h": ("", "not converted"),
        "i": ("", "not converted"),
    }
    assert Path("out/models/c/1").resolve() == Path("repo/c/1/model.savedmodel").resolve()
    assert Path("out/models/d/1/model.pb").resolve() == Path("repo/d/1/model.graphdef").resolve()
    assert _entry("c") == {"base_path": "models/c"}


def test_a_chosen_file_name_is_linked_with_the_files_that_belong_to_it() -> None:
    _add("m", f'{ONNX} default_model_filename: "net.onnx"', "1/a.onnx", "1/net.onnx", "1/weights.data", "2/net.onnx")
    _report()
    assert _entry() == {"base_path": "models/m"}
    links = {path.relative_to("out/models").as_posix() for path in Path("out/models").rglob("*") if path.is_symlink()}
    assert links == {"m/1/net.onnx", "m/1/weights.data", "m/2/net.onnx"}
    assert _migrate("--force", "--output", "out").exit_code == 0


def test_the_repository_is_never_changed_and_files_are_not_overwritten() -> None:
    _add("m", ONNX, "1/model.onnx")
    for output in ("repo", "repo/config.json", "repo/m/new"):
        result = _migrate("--output", output)
        assert result.exit_code == 64, result.output
        assert "inside of repo" in result.stderr
    Path("mine.json").write_text("{}")
    result = _migrate("--output", "mine.json")
    assert result.exit_code == 64
    assert "--force" in result.stderr
    assert Path("mine.json").read_text() == "{}"
    assert _migrate("--output", "mine.json", "--force").exit_code == 0
    assert json.loads(Path("mine.json").read_text()) == {
        "model_config_list": [{"config": {"name": "m", "base_path": "repo/m"}}]
    }
    assert sorted(path.relative_to("repo").as_posix() for path in Path("repo").rglob("*")) == [
        "m", "m/1", "m/1/model.onnx", "m/config.pbtxt",
    ]  # fmt: skip


def test_a_path_that_is_no_repository_is_a_usage_error() -> None:
    assert _migrate().exit_code == 64
    _add("m", ONNX, "1/model.onnx")
    result = run_command("migrate", "triton", "repo/m")
    assert result.exit_code == 64
    assert "is a model" in result.stderr
    Path("empty").mkdir()
    result = run_command("migrate", "triton", "empty")
    assert result.exit_code == 1
    assert "no model of empty" in result.stdout
