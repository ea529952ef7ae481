from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.specs import GraphSpec, ModelSpec, ServerSpec
from ovmstrio.core.errors import ConfigError
from tests.support.config_documents import parse_sections


def _write(path: Path, document: Any = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document, indent=1))


def _models(*configs: dict[str, Any]) -> dict[str, Any]:
    return {"model_config_list": [{"config": config} for config in configs]}


def _parse(root: Path, document: dict[str, Any]) -> ServerSpec:
    return parse_sections(root / "config.json", **document)


def _graphs(root: Path, *entries: dict[str, Any]) -> ServerSpec:
    return _parse(root, {"mediapipe_config_list": list(entries)})


@pytest.mark.parametrize(
    ("settings", "base_path", "graph_path", "subconfig"),
    [
        ({}, "g", "g/graph.pbtxt", "g/subconfig.json"),
        ({"base_path": ""}, "g", "g/graph.pbtxt", "g/subconfig.json"),
        ({"base_path": "x/"}, "x", "x/graph.pbtxt", "x/subconfig.json"),
        ({"base_path": "/x"}, "/x", "/x/graph.pbtxt", "/x/subconfig.json"),
        ({"graph_path": "a/b.pbtxt"}, "g", "g/a/b.pbtxt", "g/subconfig.json"),
        ({"base_path": "x", "graph_path": "/b.pbtxt", "subconfig": "/s.json"}, "x", "/b.pbtxt", "/s.json"),
        ({"subconfig": "models.json"}, "g", "g/graph.pbtxt", "g/models.json"),
    ],
)
def test_paths_of_a_graph_have_ovms_defaults(
    tmp_path: Path, settings: dict[str, str], base_path: str, graph_path: str, subconfig: str
) -> None:
    (graph,) = _graphs(tmp_path, {"name": "g", **settings}).of(GraphSpec)
    assert (graph.base_path, graph.graph_path) == (tmp_path / base_path, tmp_path / graph_path)
    assert (graph.subconfig, graph.problems) == (tmp_path / subconfig, ())
    assert graph.origin.startswith(f"{tmp_path}/config.json:")


@pytest.mark.parametrize("entry", [{}, {"name": 1}, {"name": "g", "nireq": 1}, {"name": "g", "graph_pth": "x"}])
def test_a_wrong_form_of_an_entry_makes_the_file_unusable(tmp_path: Path, entry: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        _graphs(tmp_path, entry)
    (problem,) = error.value.problems
    assert problem.path.startswith("mediapipe_config_list[0]")


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"name": ""}, "name"),
        ({"base_path": "s3://bucket/g"}, "base_path"),
        ({"graph_path": "g\0"}, "graph_path"),
        ({"subconfig": "gs://bucket/s.json"}, "subconfig"),
    ],
)
def test_an_unusable_value_fails_only_its_graph(tmp_path: Path, settings: dict[str, str], path: str) -> None:
    failed, other = _graphs(tmp_path, {"name": "g", **settings}, {"name": "other"}).of(GraphSpec)
    assert [problem.path for problem in failed.problems] == [f"mediapipe_config_list[0].{path}"]
    assert other.problems == ()


@pytest.mark.parametrize(
    ("settings", "place", "base_path"),
    [
        ({"base_path": "g"}, "g/graph.pbtxt", "g"),
        ({"base_path": "g"}, "g/1/graph.pbtxt", "g/1"),
        ({"base_path": "g", "graph_path": "other.pbtxt"}, "g/1/other.pbtxt", "g/1"),
        ({}, "g/graph.pbtxt", "g"),
        ({"base_path": "g", "graph_path": "missing.pbtxt"}, "g/graph.pbtxt", "g"),
    ],
)
def test_an_entry_of_the_model_list_is_a_graph_by_its_keys_or_its_folder(
    tmp_path: Path, settings: dict[str, str], place: str, base_path: str
) -> None:
    _write(tmp_path / place)
    spec = _parse(tmp_path, _models({"name": "g", **settings}, {"name": "m", "base_path": "m"}))
    assert [graph.base_path for graph in spec.of(GraphSpec)] == [tmp_path / base_path]
    assert [model.name for model in spec.of(ModelSpec)] == ["m"]
    assert spec.problems == ()


def test_a_model_option_on_a_graph_is_a_warning(tmp_path: Path) -> None:
    _write(tmp_path / "g/graph.pbtxt")
    spec = _parse(tmp_path, _models({"name": "g", "base_path": "g", "nireq": 2}))
    (problem,) = spec.problems
    assert (problem.severity, problem.path, problem.line) == ("warning", "model_config_list[0].config.nireq", 7)
    assert spec.of(GraphSpec)[0].problems == ()


def test_a_graph_of_the_model_list_takes_its_name_first(tmp_path: Path) -> None:
    _write(tmp_path / "a/graph.pbtxt")
    graphs = {"mediapipe_config_list": [{"name": "g", "base_path": "b"}]}
    spec = _parse(tmp_path, {**_models({"name": "g", "base_path": "a"}), **graphs})
    assert [graph.base_path.name for graph in spec.of(GraphSpec)] == ["a"]
    assert [(problem.severity, problem.path) for problem in spec.problems] == [
        ("warning", "mediapipe_config_list[0].name")
    ]


def test_models_of_a_subconfig_are_served_and_its_content_is_watched(tmp_path: Path) -> None:
    _write(tmp_path / "g/subconfig.json", _models({"name": "inner", "base_path": "models/inner"}))
    spec = _graphs(tmp_path, {"name": "g"}, {"name": "h"})
    (model,) = spec.of(ModelSpec)
    assert (model.name, model.base_path) == ("inner", tmp_path / "g/models/inner")
    assert model.origin == f"{tmp_path}/g/subconfig.json:4"
    assert spec.further_files == {
        tmp_path / "g/subconfig.json": (tmp_path / "g/subconfig.json").read_bytes(),
        tmp_path / "h/subconfig.json": None,
    }


@pytest.mark.parametrize(
    ("content", "line"),
    [("[", 1), ('{"model_config_list": [],\n "monitoring": {}}', 2), ('{"model_config_list": [\n{"config": 1}]}', 2)],
)
def test_an_invalid_subconfig_fails_only_its_graph(tmp_path: Path, content: str, line: int) -> None:
    _write(tmp_path / "g/subconfig.json", content)
    spec = _graphs(tmp_path, {"name": "g"}, {"name": "other"})
    failed, other = spec.of(GraphSpec)
    assert [(problem.file, problem.line) for problem in failed.problems] == [(f"{tmp_path}/g/subconfig.json", line)]
    assert (other.problems, spec.problems, spec.of(ModelSpec)) == ((), (), ())


def test_an_unreadable_subconfig_fails_its_graph(tmp_path: Path) -> None:
    (tmp_path / "g/subconfig.json").mkdir(parents=True)
    (graph,) = _graphs(tmp_path, {"name": "g"}).of(GraphSpec)
    assert [problem.file for problem in graph.problems] == [f"{tmp_path}/g/subconfig.json"]


def test_models_that_two_files_configure_are_served_once(tmp_path: Path) -> None:
    same = {"name": "same", "base_path": str(tmp_path / "same")}
    other = {"name": "other", "base_path": str(tmp_path / "other")}
    _write(tmp_path / "g/subconfig.json", _models(same, {**other, "nireq": 7}))
    graphs = {"mediapipe_config_list": [{"name": "g"}, {"name": "h", "base_path": "g"}]}
    spec = _parse(tmp_path, {**_models(same, other), **graphs})
    assert [(model.name, model.nireq) for model in spec.of(ModelSpec)] == [("same", 0), ("other", 0)]
    (problem,) = spec.problems
    assert (problem.severity, problem.file) == ("warning", f"{tmp_path}/g/subconfig.json")
    assert problem.suggestion == f"{tmp_path}/config.json:10 has it"


def test_a_graph_in_a_subconfig_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "g/subconfig.json", _models({"name": "x", "graph_path": "x.pbtxt"}))
    spec = _graphs(tmp_path, {"name": "g"})
    assert [graph.name for graph in spec.of(GraphSpec)] == ["g"]
    assert [(problem.severity, problem.path) for problem in spec.problems] == [("error", "model_config_list[0].config")]


def test_graphs_and_models_of_subconfigs_have_their_places(tmp_path: Path) -> None:
    _write(tmp_path / "g/subconfig.json", _models({"name": "m", "base_path": "m"}))
    places = {service.name: service.place for service in _graphs(tmp_path, {"name": "g"}).services if service.place}
    assert {name: (place.file, place.settings.line) for name, place in places.items()} == {
        "m": (f"{tmp_path}/g/subconfig.json", 4),
        "g": (f"{tmp_path}/config.json", 4),
    }
