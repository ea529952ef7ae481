from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ovmstrio.config.config_file import parse_config, parse_config_leniently
from ovmstrio.config.specs import (
    BatchSpec,
    MetricsSpec,
    ModelSpec,
    ServerSpec,
    ShapeSpec,
)
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import Dim
from ovmstrio.server.kinds import KINDS

FILE = Path("/etc/ovms/config.json")


def _parse(document: Any) -> ServerSpec:
    return parse_config(KINDS.values(), json.dumps(document).encode(), FILE)


def _model(**settings: Any) -> dict[str, Any]:
    return {"model_config_list": [{"config": {"name": "m", "base_path": "m", **settings}}]}


def test_models_have_the_defaults_of_ovms() -> None:
    (model,) = _parse(_model()).of(ModelSpec)
    assert (model.name, model.base_path) == ("m", Path("/etc/ovms/m"))
    assert (model.nireq, model.target_device, model.max_sequence_number) == (0, "CPU", 500)
    assert model.version_policy.select([1, 2, 3]) == [3]
    assert model.problems == ()


def test_settings_of_a_model_become_fields_of_the_spec() -> None:
    plugin_config = {"NUM_STREAMS": 2, "ENABLE_MMAP": False}
    settings = {"base_path": "/models/m", "batch_size": "2:4", "shape": {"a": "(1,10)", "b": "auto"}}
    spec = _parse(_model(**settings, nireq=3, target_device="GPU.1", plugin_config=plugin_config, allow_cache=True))
    (model,) = spec.of(ModelSpec)
    assert (model.base_path, model.batch) == (Path("/models/m"), BatchSpec(dim=Dim(2, 4)))
    assert model.shapes == {"a": ShapeSpec(dims=(Dim(1, 1), Dim(10, 10))), "b": ShapeSpec(auto=True)}
    assert (model.nireq, model.target_device, model.allow_cache) == (3, "GPU.1", True)
    assert model.plugin_config == {"NUM_STREAMS": "2", "ENABLE_MMAP": "NO"}
    assert [problem.path for problem in spec.problems] == ["model_config_list[0].config.batch_size"]


def test_metrics_are_parsed() -> None:
    assert _parse({"model_config_list": []}).metrics is None
    for section, expected in (
        ({"enable": False}, MetricsSpec(enable=False)),
        ({"enable": True, "metrics_list": ["ovms_streams"]}, MetricsSpec(enable=True, families=("ovms_streams",))),
    ):
        assert _parse({"model_config_list": [], "monitoring": {"metrics": section}}).metrics == expected


def test_all_problems_of_a_file_are_reported_with_line_and_path() -> None:
    text = """{
  "model_config_list": [
    {"config": {"name": "a", "base_path": "a",
                "nireqq": 3}},
    {"config": {"name": "b", "base_path": "b",
                "shape": "1,3"}},
    {"config": {"name": "c", "base_pth": "c"}},
    {"config": {"name": 4, "base_path": "d"},
     "confg": {}}
  ],
  "monitoring": {"metrics": {"enable": true, "metrics_list": [
      "ovms_streams",
      "ovms_stream", "ovms_streams"]}},
  "model_config_list": []
}"""
    with pytest.raises(ConfigError) as error:
        parse_config(KINDS.values(), text.encode(), FILE)
    assert [(problem.line, problem.path) for problem in error.value.problems] == [
        (4, "model_config_list[0].config.nireqq"),
        (6, "model_config_list[1].config.shape"),
        (7, "model_config_list[2].config.base_pth"),
        (8, "model_config_list[3].config.name"),
        (9, "model_config_list[3].confg"),
        (13, "monitoring.metrics.metrics_list[1]"),
        (13, "monitoring.metrics.metrics_list[2]"),
        (14, "model_config_list"),
    ]


@pytest.mark.parametrize(
    ("document", "path", "expected", "found", "suggestion"),
    [
        ([], "", "an object", "[]", ""),
        ({}, "", "", "", "add it"),
        ({"model_config_list": {}}, "model_config_list", "a list", "{}", ""),
        ({"model_config_list": [3]}, "model_config_list[0]", "an object", "3", ""),
        ({"model_config_list": [{}]}, "model_config_list[0]", "", "", "add it"),
        ({"model_config_list": [], "monitorin": {}}, "monitorin", "", "", "did you mean 'monitoring'?"),
        ({"model_config_list": [], "monitoring": {}}, "monitoring", "", "", "add it"),
        ({"model_config_list": [], "pipeline_config_list": 1}, "pipeline_config_list", "a list", "1", ""),
        (_model(nireq=-1), "model_config_list[0].config.nireq", "an integer of 0 or more", "-1", ""),
        (_model(nireq=True), "model_config_list[0].config.nireq", "an integer of 0 or more", "true", ""),
        (_model(nireq=None), "model_config_list[0].config.nireq", "an integer of 0 or more", "null", ""),
        (
            _model(batch_size=1.5),
            "model_config_list[0].config.batch_size",
            "an integer of 0 or more or a text",
            "1.5",
            "",
        ),
        (_model(shape={"a": 1}), "model_config_list[0].config.shape.a", "a text", "1", ""),
        (_model(shape=[1]), "model_config_list[0].config.shape", "a text or an object", "[1]", ""),
        (_model(batching=4), "model_config_list[0].config.batching", "an object", "4", ""),
        (_model(stateful="yes"), "model_config_list[0].config.stateful", "true or false", '"yes"', ""),
        (_model(mean=True), "model_config_list[0].config.mean", "a text or a number or a list", "true", ""),
        (_model(zzz=1), "model_config_list[0].config.zzz", "", "", "known are name, base_path"),
    ],
)
def test_a_wrong_form_makes_the_file_unusable(
    document: Any, path: str, expected: str, found: str, suggestion: str
) -> None:
    with pytest.raises(ConfigError) as error:
        _parse(document)
    (problem,) = error.value.problems
    assert (problem.file, problem.path, problem.expected, problem.found) == (str(FILE), path, expected, found)
    assert suggestion in problem.suggestion


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"{'a': 1}", b'{"model_config_list": [],}', b'{"model_config_list": "\\ud800"}']
)
def test_invalid_json_has_the_message_of_ovms(content: bytes) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(KINDS.values(), content, FILE)
    (problem,) = error.value.problems
    assert problem.message.startswith("The file is not valid json")
    assert (problem.file, problem.line) == (str(FILE), 1)


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_config(KINDS.values(), b'\xef\xbb\xbf{"model_config_list": []}', FILE) == ServerSpec()


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"layout": {"a": "XY"}}, "layout.a"),
        ({"model_version_policy": {"some": {}}}, "model_version_policy"),
        ({"batching": {"max_batch_size": 4, "batch_timeout": 1, "batch_timeout_ms": 1}}, "batching.batch_timeout"),
        ({"custom_loader_options": {"loader_name": "x"}}, "custom_loader_options"),
        ({"base_path": "../m"}, "base_path"),
        ({"base_path": "azfs://share/m"}, "base_path"),
        ({"base_path": "s3://[/m"}, "base_path"),
        ({"name": ""}, "name"),
        ({"name": "\udcff"}, "name"),
        ({"mean": 1}, "mean"),
    ],
)
def test_an_unusable_setting_fails_only_its_model(settings: dict[str, Any], path: str) -> None:
    document = _model(**settings)
    document["model_config_list"].append({"config": {"name": "other", "base_path": "other"}})
    document["model_config_list"].append({"config": {"name": "no_path"}})
    failed, other, no_path = _parse(document).of(ModelSpec)
    assert [problem.path for problem in failed.problems] == [f"model_config_list[0].config.{path}"]
    assert other.problems == ()
    assert [(problem.path, problem.message) for problem in no_path.problems] == [
        ("model_config_list[2].config", "the key 'base_path' is missing")
    ]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"shape": {"b": "(1)", "input.1": "(a)"}}, 'shape["input.1"]'),
        ({"layout": {"b": "N", "x[0]": "QQ"}}, 'layout["x[0]"]'),
        ({"precision": {"b": "FP32", "x:0": "FP99"}, "layout": "NC"}, 'precision["x:0"]'),
        ({"shape_buckets": {"a.b": {"sizes": [2, 1]}}}, 'shape_buckets["a.b"].sizes'),
    ],
)
def test_a_problem_of_a_tensor_has_the_line_of_a_name_with_dots(settings: dict[str, Any], path: str) -> None:
    content = json.dumps(_model(**settings), indent=1)
    (model,) = parse_config(KINDS.values(), content.encode(), FILE).of(ModelSpec)
    (problem,) = model.problems
    assert problem.path == f"model_config_list[0].config.{path}"
    assert problem.line is not None
    key = path.partition('"')[2].partition('"')[0]
    assert f'"{key}"' in "".join(content.splitlines()[problem.line - 2 : problem.line])


def test_custom_loaders_are_warnings_and_empty_sections_are_not() -> None:
    sections = ("model_config_list", "pipeline_config_list", "custom_node_library_config_list")
    document = {**{key: [] for key in sections}, "custom_loader_config_list": [{"config": {"loader_name": "c"}}]}
    (problem,) = _parse(document).problems
    assert (problem.severity, problem.message) == ("warning", "custom loader 'c' is not supported")
    assert _parse({key: [] for key in document}) == ServerSpec()


def test_paths_are_relative_to_the_directory_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    content = json.dumps(_model()).encode()
    (model,) = parse_config(KINDS.values(), content, Path("../config.json"), cache_dir=Path("/cache")).of(ModelSpec)
    assert (model.base_path, model.cache_dir) == (tmp_path / "m", Path("/cache"))


def test_the_usable_part_of_an_unusable_file_is_returned() -> None:
    document = _model(nireqq=1)
    examined = parse_config_leniently(KINDS.values(), json.dumps(document, indent=1).encode(), FILE)
    assert [model.name for model in examined.spec.of(ModelSpec)] == ["m"]
    assert [problem.line for problem in examined.fatal] == [7]
    place = examined.spec.services[0].place
    assert place is not None
    assert place.settings.find("base_path").line == 6


MODEL_KEYS = ["name", "base_path", "batch_size", "batching", "shape", "layout", "nireq", "plugin_config", "stateful"]
KEYS = st.sampled_from([*MODEL_KEYS, "graph_path", "subconfig", "x"])
VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.dictionaries(st.text(), st.text() | st.integers())


@given(st.lists(st.dictionaries(KEYS, VALUES)))
@example([{"name": "\0", "graph_path": ""}])
def test_any_settings_are_parsed_or_refused_with_located_problems(models: list[dict[str, Any]]) -> None:
    document = {"model_config_list": [{"config": model} for model in models]}
    try:
        spec = _parse(document)
    except ConfigError as error:
        problems = error.problems
    else:
        problems = (*spec.problems, *(problem for servable in spec.services for problem in servable.problems))
    for problem in problems:
        assert (problem.file, problem.line) == (str(FILE), 1)
        assert problem.path.startswith("model_config_list[")
