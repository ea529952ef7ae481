"""Pipelines and custom node libraries in ``config.json``: their form, their names and their paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.ovms_json import examine_config, parse_config
from ovmstrio.config.specs import NodeInput, NodeOutput, PipelineNode, PipelineSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.table import KINDS

_FILE = Path("/etc/ovms/config.json")


def _source(name: str, node: str = "request", item: str = "image") -> dict[str, Any]:
    return {name: {"node_name": node, "data_item": item}}


def _node(**settings: Any) -> dict[str, Any]:
    return {
        "name": "first",
        "type": "DL model",
        "model_name": "resnet",
        "inputs": [_source("in")],
        "outputs": [{"data_item": "prob", "alias": "scores"}],
        **settings,
    }


def _custom(**settings: Any) -> dict[str, Any]:
    node = _node(type="custom", library_name="crop", **settings)
    del node["model_name"]
    return node


def _pipeline(*nodes: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "name": "p",
        "inputs": ["image"],
        "nodes": list(nodes or [_node()]),
        "outputs": [_source("label", "first", "scores")],
        **settings,
    }


def _library(name: str = "crop", base_path: str = "nodes/crop.py") -> dict[str, Any]:
    return {"name": name, "base_path": base_path}


def _content(*pipelines: Any, libraries: Any = (), **sections: Any) -> bytes:
    document = {
        "model_config_list": [],
        "pipeline_config_list": list(pipelines),
        "custom_node_library_config_list": list(libraries),
        **sections,
    }
    return json.dumps(document, indent=1).encode()


def _parse(*pipelines: Any, path: Path = _FILE, **sections: Any) -> ServerSpec:
    return parse_config(KINDS.values(), _content(*pipelines, **sections), path)


def _fatal(*pipelines: Any, **sections: Any) -> tuple[Problem, ...]:
    return examine_config(KINDS.values(), _content(*pipelines, **sections), _FILE).fatal


def test_a_pipeline_is_read_as_it_is_written() -> None:
    """Every key has its place, and what is left out has OVMS's default."""
    second = _custom(
        name="second",
        params={"size": "3"},
        demultiply_count=-1,
        gather_from_node="first",
        inputs=[_source("data", "first", "scores"), _source("raw")],
    )
    spec = _parse(
        _pipeline(_node(version=3, demultiply_count=10_000), second, demultiply_count=1), libraries=[_library()]
    )
    (pipeline,) = spec.of(PipelineSpec)
    assert spec.problems == ()
    first_origin, second_origin = (node.origin for node in pipeline.nodes)
    assert pipeline.model_copy(update={"place": None}) == PipelineSpec(
        name="p",
        base_path=_FILE.parent,
        origin=f"{_FILE}:4",
        inputs=("image",),
        outputs=(NodeInput(name="label", node="first", data_item="scores"),),
        demultiply_count=1,
        libraries={"crop": _FILE.parent / "nodes/crop.py"},
        nodes=(
            PipelineNode(
                name="first",
                model_name="resnet",
                version=3,
                inputs=(NodeInput(name="in", node="request", data_item="image"),),
                outputs=(NodeOutput(data_item="prob", alias="scores"),),
                demultiply_count=10_000,
                origin=first_origin,
            ),
            PipelineNode(
                name="second",
                library="crop",
                params={"size": "3"},
                inputs=(
                    NodeInput(name="data", node="first", data_item="scores"),
                    NodeInput(name="raw", node="request", data_item="image"),
                ),
                outputs=(NodeOutput(data_item="prob", alias="scores"),),
                demultiply_count=-1,
                gather_from_node="first",
                origin=second_origin,
            ),
        ),
    )
    lines = _content(_pipeline(_node(version=3, demultiply_count=10_000), second)).decode().splitlines()
    for origin, name in ((first_origin, "first"), (second_origin, "second")):
        file, _, line = origin.rpartition(":")
        assert file == str(_FILE)
        assert f'"name": "{name}"' in lines[int(line)]


@pytest.mark.parametrize(
    ("pipeline", "path", "words"),
    [
        (3, "", "expected an object"),
        ({"name": "p", "inputs": [], "nodes": []}, "", "the key 'outputs' is missing"),
        (_pipeline(input=[]), ".input", "did you mean 'inputs'?"),
        (_pipeline(name=1), ".name", "expected a string"),
        (_pipeline(inputs=[1]), ".inputs[0]", "expected a string"),
        (_pipeline(inputs={}), ".inputs", "expected a list"),
        (_pipeline(demultiply_count=-2), ".demultiply_count", "-1 or more"),
        (_pipeline(demultiply_count=10_001), ".demultiply_count", "10000 or less"),
        (_pipeline(demultiply_count="2"), ".demultiply_count", "an integer"),
        (_pipeline(demultiply_count=True), ".demultiply_count", "an integer"),
        (_pipeline(nodes=["n"]), ".nodes[0]", "expected an object"),
        (_pipeline(outputs=["n"]), ".outputs[0]", "expected an object"),
        (_pipeline(outputs=[{}]), ".outputs[0]", "one name with its source"),
        (_pipeline(outputs=[_source("a") | _source("b")]), ".outputs[0]", "one name with its source"),
        (_pipeline(outputs=[{"a": 1}]), ".outputs[0].a", "expected an object"),
        (_pipeline(outputs=[{"a": {"node_name": "n"}}]), ".outputs[0].a", "the key 'data_item' is missing"),
        (_pipeline(_node(name=None)), ".nodes[0].name", "expected a string"),
        (_pipeline(_node(inputs=[{}])), ".nodes[0].inputs[0]", "one name with its source"),
        (_pipeline(_node(inputs=[{"a": {"node_name": 1, "data_item": ""}}])), ".nodes[0].inputs[0].a.node_name", "str"),
        (_pipeline(_node(inputs=[_source("a") | _source("b")])), ".nodes[0].inputs[0]", "one name with its source"),
        (_pipeline(_node(outputs=[{"data_item": "a"}])), ".nodes[0].outputs[0]", "the key 'alias' is missing"),
        (_pipeline(_node(outputs=[{"data_item": "a", "allias": "a"}])), ".nodes[0].outputs[0].allias", "'alias'?"),
        (_pipeline(_node(type="dl model")), ".nodes[0].type", "did you mean 'DL model'?"),
        (_pipeline(_node(type=1)), ".nodes[0].type", "expected a string"),
        (_pipeline(_node(library_name="l")), ".nodes[0].library_name", "not for a node of type 'DL model'"),
        (_pipeline(_custom() | {"model_name": "m"}), ".nodes[0].model_name", "not for a node of type 'custom'"),
        (_pipeline(_node(version=0)), ".nodes[0].version", "1 or more"),
        (_pipeline(_custom(params={"a": 1})), ".nodes[0].params.a", "expected a string"),
        (_pipeline(_node(gather_from_node=[])), ".nodes[0].gather_from_node", "expected a string"),
        (_pipeline(_node(gather_from="x")), ".nodes[0].gather_from", "did you mean 'gather_from_node'?"),
    ],
)
def test_a_wrong_form_makes_the_file_unusable(pipeline: Any, path: str, words: str) -> None:
    """The problem has its place and the way out."""
    (problem,) = _fatal(pipeline, libraries=[_library()])
    assert problem.path == f"pipeline_config_list[0]{path}"
    assert problem.line is not None
    assert words in str(problem)


@pytest.mark.parametrize(("kind", "key"), [("DL model", "model_name"), ("custom", "library_name")])
def test_a_node_must_say_what_it_calls(kind: str, key: str) -> None:
    """A model for the one type, a library for the other."""
    node = {"name": "n", "type": kind, "inputs": [], "outputs": []}
    (problem,) = _fatal(_pipeline(node))
    assert (problem.path, problem.message) == ("pipeline_config_list[0].nodes[0]", f"the key {key!r} is missing")


def test_every_mistake_of_a_file_is_told_at_once() -> None:
    """In the order of their lines, whatever parts of it they are in."""
    broken = _pipeline(
        _node(version=0, nam="x"), _custom(outputs=[{}]), demultiply_count=20_000, outputs=[{"o": {"node": "first"}}]
    )
    with pytest.raises(ConfigError) as error:
        _parse(broken, _pipeline(type="x"), libraries=[{"name": "l"}])
    problems = error.value.problems
    assert [problem.line for problem in problems] == sorted(problem.line or 0 for problem in problems)
    assert {problem.path.partition("_list")[2] for problem in problems} == {
        "[0].nodes[0].version",
        "[0].nodes[0].nam",
        "[0].nodes[1].outputs[0]",
        "[0].outputs[0].o.node",
        "[0].outputs[0].o",
        "[0].demultiply_count",
        "[1].type",
        "[0]",
    }


def test_a_demultiply_count_of_zero_is_the_old_way_to_write_minus_one() -> None:
    """It is understood, with a warning for each place."""
    spec = _parse(_pipeline(_node(demultiply_count=0), demultiply_count=0))
    (pipeline,) = spec.of(PipelineSpec)
    assert (pipeline.demultiply_count, pipeline.nodes[0].demultiply_count) == (-1, -1)
    assert pipeline.problems == ()
    assert [(problem.severity, problem.suggestion) for problem in spec.problems] == [("warning", "write -1")] * 2


def test_keys_without_effect_are_warned_about() -> None:
    """A custom node has no version, and a model no params."""
    spec = _parse(_pipeline(_node(params={}), _custom(version=2)), libraries=[_library()])
    assert spec.of(PipelineSpec)[0].problems == ()
    assert [(problem.path.rpartition(".")[2], problem.severity) for problem in spec.problems] == [
        ("params", "warning"),
        ("version", "warning"),
    ]


def test_of_two_pipelines_with_one_name_the_first_counts() -> None:
    """The other one is left out, with a warning that names the line of the first."""
    spec = _parse(_pipeline(), _pipeline(inputs=["other"]), _pipeline(name="q"))
    assert [(pipeline.name, pipeline.inputs) for pipeline in spec.of(PipelineSpec)] == [
        ("p", ("image",)),
        ("q", ("image",)),
    ]
    (problem,) = spec.problems
    assert (problem.path, problem.severity) == ("pipeline_config_list[1].name", "warning")
    assert problem.suggestion == "line 4 has it"


def test_models_pipelines_and_graphs_share_their_names() -> None:
    """A model has the name before a pipeline, a pipeline before a graph; who comes late is not served."""
    spec = _parse(
        _pipeline(name="m"),
        _pipeline(),
        model_config_list=[{"config": {"name": "m", "base_path": "/m"}}],
        mediapipe_config_list=[{"name": "p"}, {"name": "m"}],
    )
    assert [(each.kind, each.name) for each in spec.services] == [("model", "m"), ("pipeline", "p")]
    assert [(problem.severity, problem.path, problem.message) for problem in spec.problems] == [
        (
            "error",
            "pipeline_config_list[0].name",
            "Pipeline has the same name as model: 'm' is a model's, which is served",
        ),
        (
            "error",
            "mediapipe_config_list[0].name",
            "Given mediapipe graph name is already occupied: 'p' is a pipeline's, which is served",
        ),
        (
            "error",
            "mediapipe_config_list[1].name",
            "Given mediapipe graph name is already occupied: 'm' is a model's, which is served",
        ),
    ]


def test_a_pipeline_without_a_name_is_known_with_its_problem() -> None:
    """As a model without one, it only fails itself."""
    spec = _parse(_pipeline(name=""), _pipeline())
    assert [[problem.message for problem in each.problems] for each in spec.of(PipelineSpec)] == [
        ["the name is empty"],
        [],
    ]


@pytest.mark.parametrize(
    ("base_path", "path"),
    [
        ("nodes/crop.py", "{root}/nodes/crop.py"),
        ("libcrop.so", "{root}/libcrop.so"),
        ("/opt/libcrop.so", "/opt/libcrop.so"),
        ("add_one", "add_one"),
        ("plain_file", "{root}/plain_file"),
        ("a_directory", "a_directory"),
        ("/ovms/lib/custom_nodes/libcustom_node_add_one.so", "add_one"),
        ("/ovms/lib/custom_nodes/other.so", "/ovms/lib/custom_nodes/other.so"),
    ],
)
def test_a_library_is_a_file_or_built_in(tmp_path: Path, base_path: str, path: str) -> None:
    """Relative paths lead on from the file's directory; names and OVMS's own paths stand for what is built in."""
    (tmp_path / "plain_file").touch()
    (tmp_path / "a_directory").mkdir()
    libraries = [_library(base_path=base_path), _library("unused", "x.so")]
    (pipeline,) = _parse(_pipeline(_custom()), path=tmp_path / "config.json", libraries=libraries).of(PipelineSpec)
    assert pipeline.problems == ()
    assert pipeline.libraries == {"crop": Path(path.format(root=tmp_path))}


@pytest.mark.parametrize("base_path", ["", "../crop.so", "/opt/../crop.so", "s3://bucket/crop.so", "c\0.so"])
def test_a_library_that_cannot_be_used_fails_the_pipelines_that_use_it(base_path: str) -> None:
    """The place of the library has a warning; a pipeline without it is served."""
    spec = _parse(_pipeline(_custom()), _pipeline(name="q"), libraries=[_library(base_path=base_path)])
    assert [(problem.severity, problem.path) for problem in spec.problems] == [
        ("warning", "custom_node_library_config_list[0].base_path")
    ]
    broken, other = spec.of(PipelineSpec)
    (problem,) = broken.problems
    assert (problem.severity, problem.path) == ("error", "pipeline_config_list[0].nodes[0].library_name")
    assert problem.message == "the custom node library 'crop' cannot be used"
    assert other.problems == ()


def test_a_library_that_is_not_configured_fails_only_its_pipelines() -> None:
    """The problem is at the node, with the name that was meant."""
    spec = _parse(_pipeline(_node(), _custom()), _pipeline(name="q"), libraries=[_library("crops")])
    broken, other = spec.of(PipelineSpec)
    (problem,) = broken.problems
    assert problem.path == "pipeline_config_list[0].nodes[1].library_name"
    assert (problem.message, problem.suggestion) == (
        "there is no custom node library 'crop'",
        "did you mean 'crops'?",
    )
    assert (spec.problems, other.problems) == ((), ())


def test_of_two_libraries_with_one_name_the_first_counts() -> None:
    """A warning says so."""
    spec = _parse(_pipeline(_custom()), libraries=[_library(), _library(base_path="/other.so")])
    assert spec.of(PipelineSpec)[0].libraries == {"crop": _FILE.parent / "nodes/crop.py"}
    (problem,) = spec.problems
    assert (problem.severity, problem.path) == ("warning", "custom_node_library_config_list[1].name")


@pytest.mark.parametrize("library", [{"name": "l"}, {"name": "l", "base_path": 1}, {**_library(), "x": 1}, 3])
def test_a_wrong_form_of_a_library_makes_the_file_unusable(library: Any) -> None:
    """It has two keys, both texts."""
    (problem,) = _fatal(libraries=[library])
    assert problem.path.startswith("custom_node_library_config_list[0]")


def test_an_input_that_is_given_twice_counts_once() -> None:
    """With a warning, for OVMS takes it as well."""
    spec = _parse(_pipeline(inputs=["image", "mask", "image"]))
    (problem,) = spec.problems
    assert spec.of(PipelineSpec)[0].inputs == ("image", "mask")
    assert (problem.severity, problem.path) == ("warning", "pipeline_config_list[0].inputs")
    assert problem.message == "the input 'image' is given twice"


def test_places_tell_where_a_pipeline_is_configured() -> None:
    """As they do of models and graphs."""
    place = examine_config(KINDS.values(), _content(_pipeline()), _FILE).spec.services[0].place
    assert place is not None
    assert (place.file, place.settings.line, place.settings.path) == (str(_FILE), 4, "pipeline_config_list[0]")


@pytest.mark.parametrize(
    ("change", "reload"),
    [({"origin": "elsewhere:1"}, False), ({"inputs": ("x",)}, True), ({"libraries": {"crop": Path("/x.py")}}, True)],
)
def test_a_pipeline_is_loaded_again_when_its_settings_change(change: dict[str, Any], reload: bool) -> None:
    """Where it is written does not count, and neither does where its nodes are."""
    (pipeline,) = _parse(_pipeline()).of(PipelineSpec)
    moved = tuple(node.model_copy(update={"origin": "elsewhere:9"}) for node in pipeline.nodes)
    other = pipeline.model_copy(update={"nodes": moved, **change})
    assert pipeline.needs_reload(other) is reload


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["", "p", "DL model", "custom", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["name", "type", "node_name", "data_item", "alias", "inputs", "nodes"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from([*_pipeline(), "demultiply_count"]), _JSON),
    st.dictionaries(st.sampled_from([*_node(), *_custom(), "version", "params", "gather_from_node"]), _JSON),
)
def test_whatever_is_written_is_either_read_or_refused(pipeline: dict[str, Any], node: dict[str, Any]) -> None:
    """A pipeline is there exactly if nothing about the form of the file is wrong."""
    entry = {**_pipeline({**_node(), **node}), **pipeline}
    examined = examine_config(KINDS.values(), _content(entry, libraries=[_library()]), _FILE)
    assert len(examined.spec.of(PipelineSpec)) == (0 if examined.fatal else 1)
    assert all(problem.line and problem.path.startswith("pipeline_config_list[0]") for problem in examined.fatal)
