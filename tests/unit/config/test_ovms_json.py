from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ovmstrio.config.ovms_json import examine_config, parse_config
from ovmstrio.config.specs import (
    AllVersions,
    BatchSpec,
    LayoutSpec,
    MetricsSpec,
    ModelSpec,
    ServerSpec,
    ShapeSpec,
)
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import Dim
from ovmstrio.runtimes.table import KINDS

FILE = Path("/etc/ovms/config.json")


def _parse(document: Any) -> ServerSpec:
    return parse_config(KINDS.values(), json.dumps(document).encode(), FILE)


def _model(**settings: Any) -> dict[str, Any]:
    return {"model_config_list": [{"config": {"name": "m", "base_path": "m", **settings}}]}


def _refused(text: str) -> list[tuple[int | None, str]]:
    with pytest.raises(ConfigError) as error:
        parse_config(KINDS.values(), text.encode(), FILE)
    return [(problem.line, problem.path) for problem in error.value.problems]


def _only(document: Any) -> Problem:
    with pytest.raises(ConfigError) as error:
        _parse(document)
    (problem,) = error.value.problems
    return problem


def test_a_model_has_ovms_defaults() -> None:
    """Name and path are enough; the path leads on from the file's directory."""
    (model,) = _parse(_model()).of(ModelSpec)
    assert (model.name, model.base_path) == ("m", Path("/etc/ovms/m"))
    assert (model.nireq, model.target_device, model.max_sequence_number) == (0, "CPU", 500)
    assert model.version_policy.select([1, 2, 3]) == [3]
    assert model.problems == ()


def test_every_setting_reaches_the_spec() -> None:
    """Each key of a model is read, and an absolute path stays."""
    spec = _parse(
        _model(
            base_path="/models/m",
            batch_size="2:4",
            shape={"a": "(1,10)", "b": "auto"},
            layout="NHWC:NCHW",
            model_version_policy={"all": {}},
            nireq=3,
            target_device="GPU.1",
            plugin_config={"NUM_STREAMS": 2, "ENABLE_MMAP": False},
            allow_cache=True,
        )
    )
    (model,) = spec.of(ModelSpec)
    assert model.base_path == Path("/models/m")
    assert model.batch == BatchSpec(dim=Dim(2, 4))
    assert model.shapes == {"a": ShapeSpec(dims=(Dim(1, 1), Dim(10, 10))), "b": ShapeSpec(auto=True)}
    assert model.layouts == {"": LayoutSpec(tensor="NHWC", model="NCHW")}
    assert model.version_policy == AllVersions()
    assert (model.nireq, model.target_device, model.allow_cache) == (3, "GPU.1", True)
    assert model.plugin_config == {"NUM_STREAMS": "2", "ENABLE_MMAP": "NO"}
    assert [problem.path for problem in spec.problems] == ["model_config_list[0].config.batch_size"]


def test_metrics_are_read() -> None:
    """With and without a list of families; without the section there is nothing to say."""
    assert _parse({"model_config_list": []}).metrics is None
    section = {"enable": False}
    assert _parse({"model_config_list": [], "monitoring": {"metrics": section}}).metrics == MetricsSpec(enable=False)
    section = {"enable": True, "metrics_list": ["ovms_streams"]}  # type: ignore[dict-item]
    spec = _parse({"model_config_list": [], "monitoring": {"metrics": section}})
    assert spec.metrics == MetricsSpec(enable=True, families=("ovms_streams",))


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    """Mistakes of form and of single models, in entries far apart, each with its line and path."""
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
      "ovms_stream"]}}
}"""
    assert _refused(text) == [
        (4, "model_config_list[0].config.nireqq"),
        (6, "model_config_list[1].config.shape"),
        (7, "model_config_list[2].config.base_pth"),
        (8, "model_config_list[3].config.name"),
        (9, "model_config_list[3].confg"),
        (12, "monitoring.metrics.metrics_list[0]"),
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
        (_model(nireq=-1), "model_config_list[0].config.nireq", "0 or more", "-1", ""),
        (_model(nireq=True), "model_config_list[0].config.nireq", "an integer", "true", ""),
        (_model(nireq=None), "model_config_list[0].config.nireq", "an integer", "null", ""),
        (_model(batch_size=1.5), "model_config_list[0].config.batch_size", "an integer or a string", "1.5", ""),
        (_model(shape={"a": 1}), "model_config_list[0].config.shape.a", "a string", "1", ""),
        (_model(shape=[1]), "model_config_list[0].config.shape", "a string or an object", "[1]", ""),
        (_model(batching=4), "model_config_list[0].config.batching", "an object", "4", ""),
        (_model(stateful="yes"), "model_config_list[0].config.stateful", "true or false", '"yes"', ""),
        (_model(mean=True), "model_config_list[0].config.mean", "a string or a number or a list", "true", ""),
        (_model(weird=1), "model_config_list[0].config.weird", "", "", "known are name, base_path"),
    ],
)
def test_a_broken_form_makes_the_file_unusable(
    document: Any, path: str, expected: str, found: str, suggestion: str
) -> None:
    """Unknown and missing keys and wrong types are told with place, expectation and suggestion."""
    problem = _only(document)
    assert (problem.file, problem.path, problem.expected, problem.found) == (str(FILE), path, expected, found)
    assert suggestion in problem.suggestion


def test_families_are_known_and_named_once() -> None:
    """An unknown and a repeated metric family make the file unusable."""
    families = ["ovms_streams", "ovms_strims", "ovms_streams"]
    document = {"model_config_list": [], "monitoring": {"metrics": {"enable": True, "metrics_list": families}}}
    with pytest.raises(ConfigError) as error:
        _parse(document)
    unknown, repeated = error.value.problems
    assert (unknown.path, unknown.suggestion) == (
        "monitoring.metrics.metrics_list[1]",
        "did you mean 'ovms_streams'?",
    )
    assert "given twice" in repeated.message


def test_a_repeated_key_is_a_mistake() -> None:
    """It is not left to chance which of two values counts."""
    assert _refused('{"model_config_list": [],\n"model_config_list": []}') == [(2, "model_config_list")]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{'a': 1}", b'{"model_config_list": [],}'])
def test_what_is_no_json_is_told_in_the_words_of_ovms(content: bytes) -> None:
    """Clients look for the beginning of the message."""
    with pytest.raises(ConfigError) as error:
        parse_config(KINDS.values(), content, FILE)
    (problem,) = error.value.problems
    assert problem.message.startswith("The file is not valid json")
    assert (problem.file, problem.line) == (str(FILE), 1)


def test_a_byte_order_mark_is_no_mistake() -> None:
    """Editors of some systems write one."""
    assert parse_config(KINDS.values(), b'\xef\xbb\xbf{"model_config_list": []}', FILE) == ServerSpec()


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"shape": "1,3"}, "shape"),
        ({"layout": {"a": "XY"}}, "layout.a"),
        ({"model_version_policy": {"some": {}}}, "model_version_policy"),
        ({"nireq": 100_001}, "nireq"),
        ({"stateful": True, "shape": "auto"}, "shape"),
        ({"batching": {"max_batch_size": 4, "batch_timeout": 1, "batch_timeout_ms": 1}}, "batching.batch_timeout"),
        ({"sequence_migration": True}, "sequence_migration"),
        ({"max_sequence_number": 1}, "max_sequence_number"),
        ({"custom_loader_options": {"loader_name": "x"}}, "custom_loader_options"),
        ({"base_path": "../m"}, "base_path"),
        ({"base_path": "gs://bucket/m"}, "base_path"),
        ({"name": ""}, "name"),
    ],
)
def test_what_is_wrong_with_one_model_leaves_the_others(settings: dict[str, Any], path: str) -> None:
    """The model is known with its problem, and its neighbour is served."""
    document = _model(**settings)
    document["model_config_list"].append({"config": {"name": "other", "base_path": "other"}})
    broken, other = _parse(document).of(ModelSpec)
    assert [problem.path for problem in broken.problems] == [f"model_config_list[0].config.{path}"]
    assert other.problems == ()


def test_a_model_without_a_path_fails_alone() -> None:
    """The place is that of its settings."""
    (model,) = _parse({"model_config_list": [{"config": {"name": "m"}}]}).of(ModelSpec)
    assert [(problem.path, problem.message) for problem in model.problems] == [
        ("model_config_list[0].config", "the key 'base_path' is missing")
    ]


def test_the_first_of_two_models_of_one_name_is_served() -> None:
    """The second is an error that belongs to no model."""
    document = _model()
    document["model_config_list"].append({"config": {"name": "m", "base_path": "other"}})
    spec = _parse(document)
    assert [model.base_path.name for model in spec.of(ModelSpec)] == ["m"]
    assert [(problem.severity, problem.path) for problem in spec.problems] == [
        ("error", "model_config_list[1].config.name")
    ]


def test_a_batch_size_that_is_ignored_is_a_warning() -> None:
    """As in OVMS, the model is served with its own."""
    for settings in ({"batch_size": "many"}, {"batch_size": 2, "shape": "(2,3)"}):
        spec = _parse(_model(**settings))
        assert spec.of(ModelSpec)[0].problems == ()
        assert [problem.severity for problem in spec.problems] == ["warning"]


def test_what_this_version_does_not_serve_is_told() -> None:
    """Custom loaders are warnings with their names; empty sections are none."""
    document = {
        "model_config_list": [],
        "pipeline_config_list": [],
        "custom_node_library_config_list": [],
        "custom_loader_config_list": [{"config": {"loader_name": "c"}}],
    }
    (problem,) = _parse(document).problems
    assert (problem.severity, problem.message) == (
        "warning",
        "custom loader 'c' is not served by this version",
    )
    empty: dict[str, list[Any]] = {key: [] for key in document}
    assert _parse(empty) == ServerSpec()


def test_paths_in_a_file_lead_on_from_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are free of the way that led to the file; the cache is the server's, not the file's."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    content = json.dumps(_model()).encode()
    (model,) = parse_config(KINDS.values(), content, Path("../config.json"), cache_dir=Path("/cache")).of(ModelSpec)
    assert (model.base_path, model.cache_dir) == (tmp_path / "m", Path("/cache"))


def test_what_can_be_understood_of_a_broken_file_is_given() -> None:
    """For those who want to look on, with the places of the models."""
    document = _model(nireqq=1)
    examined = examine_config(KINDS.values(), json.dumps(document, indent=1).encode(), FILE)
    assert [model.name for model in examined.spec.of(ModelSpec)] == ["m"]
    assert [problem.line for problem in examined.fatal] == [7]
    place = examined.spec.services[0].place
    assert place is not None
    assert place.settings.find("base_path").line == 6


KEYS = st.sampled_from(
    [
        "name",
        "base_path",
        "graph_path",
        "subconfig",
        "batch_size",
        "batching",
        "shape",
        "layout",
        "nireq",
        "plugin_config",
        "stateful",
        "x",
    ]
)
VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.dictionaries(st.text(), st.text() | st.integers())


@given(st.lists(st.dictionaries(KEYS, VALUES)))
@example([{"name": "\0", "graph_path": ""}])
def test_no_settings_fail_otherwise_than_with_located_problems(models: list[dict[str, Any]]) -> None:
    """Whatever the settings are, they are read or refused with file, line and path."""
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


def test_preprocessing_may_be_configured_as_on_the_command_line() -> None:
    """Mean and scale are numbers, lists or OVMS's texts; precision and colours as texts or by input."""
    settings = {"layout": "NHWC:NCHW", "precision": "uint8:fp32", "color_format": {"x": "BGR:RGB"}}
    for mean in ([1, 2.5, 3], "[1,2.5,3]", "(1, 2.5, 3)"):
        spec = parse_config(KINDS.values(), json.dumps(_model(mean=mean, scale=2, **settings)).encode(), Path("c.json"))
        (model,) = spec.services
        assert isinstance(model, ModelSpec)
        assert (model.mean, model.scale, model.errors) == ((1.0, 2.5, 3.0), (2.0,), ())
        assert (model.precisions, model.color_formats) == ({"": "UINT8"}, {"x": "BGR:RGB"})


def test_preprocessing_needs_a_layout_in_the_file_too() -> None:
    """The model is known by name and fails with the way out."""
    spec = parse_config(KINDS.values(), json.dumps(_model(mean=1)).encode(), Path("c.json"))
    (model,) = spec.services
    assert [problem.message for problem in model.errors] == ["this needs a layout"]
