from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.specs import NodeInput, NodeOutput, PipelineNode, PipelineSpec, ServerSpec
from ovmstrio.core.errors import Problem
from tests.support.config_documents import (
    CONFIG_FILE,
    config_content,
    examine_sections,
    fatal_problems,
    parse_sections,
)

_NODE: Any = {"name": "n", "inputs": [], "outputs": []}


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


def _parse(*pipelines: Any, path: Path = CONFIG_FILE, libraries: Any = (), **sections: Any) -> ServerSpec:
    lists = {"pipeline_config_list": list(pipelines), "custom_node_library_config_list": list(libraries)}
    return parse_sections(path, **lists, **sections)


def _fatal(*pipelines: Any, libraries: Any = ()) -> tuple[Problem, ...]:
    return fatal_problems(pipeline_config_list=list(pipelines), custom_node_library_config_list=list(libraries))


def test_keys_of_a_pipeline_become_fields_of_the_spec() -> None:
    first = _node(version=3, demultiply_count=10_000)
    second = _custom(
        name="second",
        params={"size": "3"},
        demultiply_count=-1,
        gather_from_node="first",
        inputs=[_source("data", "first", "scores"), _source("raw")],
    )
    spec = _parse(_pipeline(first, second, demultiply_count=1), libraries=[_library()])
    (pipeline,) = spec.of(PipelineSpec)
    assert spec.problems == ()
    first_origin, second_origin = (node.origin for node in pipeline.nodes)
    assert pipeline.model_copy(update={"place": None}) == PipelineSpec(
        name="p",
        base_path=CONFIG_FILE.parent,
        origin=f"{CONFIG_FILE}:4",
        inputs=("image",),
        outputs=(NodeInput(name="label", node="first", data_item="scores"),),
        demultiply_count=1,
        libraries={"crop": CONFIG_FILE.parent / "nodes/crop.py"},
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
    lines = config_content(pipeline_config_list=[_pipeline(first, second)]).decode().splitlines()
    for origin, name in ((first_origin, "first"), (second_origin, "second")):
        file, _, line = origin.rpartition(":")
        assert file == str(CONFIG_FILE)
        assert f'"name": "{name}"' in lines[int(line)]


@pytest.mark.parametrize(
    ("pipeline", "path", "message"),
    [
        (3, "", "expected an object"),
        ({"name": "p", "inputs": [], "nodes": []}, "", "the key 'outputs' is missing"),
        (_pipeline(input=[]), ".input", "did you mean 'inputs'?"),
        (_pipeline(name=1), ".name", "expected a text"),
        (_pipeline(inputs=[1]), ".inputs[0]", "expected a text"),
        (_pipeline(inputs={}), ".inputs", "expected a list"),
        (_pipeline(demultiply_count=-2), ".demultiply_count", "an integer of -1 to 10000"),
        (_pipeline(demultiply_count=10_001), ".demultiply_count", "an integer of -1 to 10000"),
        (_pipeline(demultiply_count="2"), ".demultiply_count", "an integer"),
        (_pipeline(demultiply_count=True), ".demultiply_count", "an integer"),
        (_pipeline(nodes=["n"]), ".nodes[0]", "expected an object"),
        (_pipeline(outputs=["n"]), ".outputs[0]", "expected an object"),
        (_pipeline(outputs=[{}]), ".outputs[0]", "one name with its source"),
        (_pipeline(outputs=[_source("a") | _source("b")]), ".outputs[0]", "one name with its source"),
        (_pipeline(outputs=[{"a": 1}]), ".outputs[0].a", "expected an object"),
        (_pipeline(outputs=[{"a": {"node_name": "n"}}]), ".outputs[0].a", "the key 'data_item' is missing"),
        (_pipeline(_node(name=None)), ".nodes[0].name", "expected a text"),
        (_pipeline(_node(inputs=[{}])), ".nodes[0].inputs[0]", "one name with its source"),
        (
            _pipeline(_node(inputs=[{"a": {"node_name": 1, "data_item": ""}}])),
            ".nodes[0].inputs[0].a.node_name",
            "a text",
        ),
        (_pipeline(_node(inputs=[_source("a") | _source("b")])), ".nodes[0].inputs[0]", "one name with its source"),
        (_pipeline(_node(outputs=[{"data_item": "a"}])), ".nodes[0].outputs[0]", "the key 'alias' is missing"),
        (_pipeline(_node(outputs=[{"data_item": "a", "allias": "a"}])), ".nodes[0].outputs[0].allias", "'alias'?"),
        (_pipeline(_node(type="dl model")), ".nodes[0].type", "did you mean 'DL model'?"),
        (_pipeline(_node(type=1)), ".nodes[0].type", "expected a text"),
        (_pipeline(_node(library_name="l")), ".nodes[0].library_name", "not allowed for node type 'DL model'"),
        (_pipeline(_custom() | {"model_name": "m"}), ".nodes[0].model_name", "not allowed for node type 'custom'"),
        (_pipeline(_node(model_name="")), ".nodes[0].model_name", "a text that is not empty"),
        (_pipeline(_custom() | {"library_name": ""}), ".nodes[0].library_name", "a text that is not empty"),
        (_pipeline(_node(version=0)), ".nodes[0].version", "1 or more"),
        (_pipeline(_custom(params={"a": 1})), ".nodes[0].params.a", "expected a text"),
        (_pipeline(_node(gather_from_node=[])), ".nodes[0].gather_from_node", "expected a text"),
        (_pipeline(_NODE | {"type": "DL model"}), ".nodes[0]", "the key 'model_name' is missing"),
        (_pipeline(_NODE | {"type": "custom"}), ".nodes[0]", "the key 'library_name' is missing"),
        (_pipeline(_node(gather_from="x")), ".nodes[0].gather_from", "did you mean 'gather_from_node'?"),
    ],
)
def test_a_wrong_form_of_a_pipeline_makes_the_file_unusable(pipeline: Any, path: str, message: str) -> None:
    (problem,) = _fatal(pipeline, libraries=[_library()])
    assert problem.path == f"pipeline_config_list[0]{path}"
    assert problem.line is not None
    assert message in str(problem)


@pytest.mark.parametrize(
    ("pipeline", "fields", "warnings"),
    [
        (_pipeline(demultiply_count=0), {"demultiply_count": -1}, {".demultiply_count": "use -1"}),
        (_pipeline(inputs=["image", "mask", "image"]), {"inputs": ("image", "mask")}, {".inputs": ""}),
        (_pipeline(_node(params={}), _custom(version=2)), {}, {".nodes[0].params": "", ".nodes[1].version": ""}),
    ],
    ids=["old spelling of -1", "repeated input", "keys without effect"],
)
def test_keys_that_are_understood_otherwise_are_warnings(
    pipeline: dict[str, Any], fields: dict[str, Any], warnings: dict[str, str]
) -> None:
    spec = _parse(pipeline, libraries=[_library()])
    (parsed,) = spec.of(PipelineSpec)
    assert {name: getattr(parsed, name) for name in fields} == fields
    assert parsed.problems == ()
    found = {problem.path: (problem.severity, problem.suggestion) for problem in spec.problems}
    assert found.keys() == {f"pipeline_config_list[0]{path}" for path in warnings}
    for path, suggestion in warnings.items():
        severity, found_suggestion = found[f"pipeline_config_list[0]{path}"]
        assert (severity, suggestion in found_suggestion) == ("warning", True)


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
    (tmp_path / "plain_file").touch()
    (tmp_path / "a_directory").mkdir()
    libraries = [_library(base_path=base_path), _library("unused", "x.so")]
    (pipeline,) = _parse(_pipeline(_custom()), path=tmp_path / "config.json", libraries=libraries).of(PipelineSpec)
    assert pipeline.problems == ()
    assert pipeline.libraries == {"crop": Path(path.format(root=tmp_path))}


_UNUSABLE = "invalid custom node library 'crop'"


@pytest.mark.parametrize(
    ("library", "message", "suggestion", "warnings"),
    [
        *(
            (_library(base_path=path), _UNUSABLE, "", ["custom_node_library_config_list[0].base_path"])
            for path in ("", "../crop.so", "/opt/../crop.so", "s3://bucket/crop.so", "c\0.so")
        ),
        (_library("crops"), "unknown custom node library 'crop'", "did you mean 'crops'?", []),
    ],
)
def test_an_unusable_library_fails_only_the_pipelines_that_use_it(
    library: dict[str, Any], message: str, suggestion: str, warnings: list[str]
) -> None:
    spec = _parse(_pipeline(_node(), _custom()), _pipeline(name="q"), _pipeline(name=""), libraries=[library])
    assert [problem.path for problem in spec.problems if problem.severity == "warning"] == warnings
    failed, other, unnamed = spec.of(PipelineSpec)
    (problem,) = failed.problems
    assert (problem.severity, problem.path) == ("error", "pipeline_config_list[0].nodes[1].library_name")
    assert (problem.message, suggestion in problem.suggestion) == (message, True)
    assert (other.problems, [each.message for each in unnamed.problems]) == ((), ["the name is empty"])


def test_the_first_of_two_libraries_with_one_name_is_used() -> None:
    spec = _parse(_pipeline(_custom()), libraries=[_library(), _library(base_path="/other.so")])
    assert spec.of(PipelineSpec)[0].libraries == {"crop": CONFIG_FILE.parent / "nodes/crop.py"}
    (problem,) = spec.problems
    assert (problem.severity, problem.path) == ("warning", "custom_node_library_config_list[1].name")
    for wrong in ({"name": "l"}, {"name": "l", "base_path": 1}, {**_library(), "x": 1}, 3):
        (fatal,) = _fatal(libraries=[wrong])
        assert fatal.path.startswith("custom_node_library_config_list[0]")


@pytest.mark.parametrize(
    ("change", "reload"),
    [({"origin": "elsewhere:1"}, False), ({"inputs": ("x",)}, True), ({"libraries": {"crop": Path("/x.py")}}, True)],
)
def test_changed_settings_need_a_reload_and_moved_lines_do_not(change: dict[str, Any], reload: bool) -> None:
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
def test_any_entry_is_either_parsed_or_refused_with_its_place(pipeline: dict[str, Any], node: dict[str, Any]) -> None:
    entry = {**_pipeline({**_node(), **node}), **pipeline}
    examined = examine_sections(pipeline_config_list=[entry], custom_node_library_config_list=[_library()])
    assert len(examined.spec.of(PipelineSpec)) == (0 if examined.fatal else 1)
    assert all(problem.line and problem.path.startswith("pipeline_config_list[0]") for problem in examined.fatal)
