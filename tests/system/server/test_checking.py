from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.config.config_file import parse_config
from ovmstrio.server.check import CheckReport, LoadedVersion, check_config, check_pipelines
from ovmstrio.server.kinds import KINDS
from ovmstrio.serving.registry import Registry
from tests.support import ir
from tests.support.examples import examples
from tests.support.graphs import graph_text, python_node, session_text
from tests.support.pipelines import pipeline_entry
from tests.support.projects import PYTHON, write
from tests.support.stub_registry import running


def _config(root: Path, *models: dict[str, Any], **sections: Any) -> Path:
    path = root / "config.json"
    entries = [{"config": model} for model in models]
    path.write_text(json.dumps({"model_config_list": entries, **sections}, indent=1))
    return path


async def _check(root: Path, *models: str | dict[str, Any], **sections: Any) -> CheckReport:
    """Check a configuration with models, which are folders of their names unless they are complete entries."""
    entries = [{"name": model, "base_path": model} if isinstance(model, str) else model for model in models]
    return await check_config(_config(root, *entries, **sections))


def _places(report: CheckReport) -> list[tuple[str, str, str]]:
    return [(Path(problem.file).name, problem.path, problem.severity) for problem in report.problems]


def _line(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


async def test_versions_of_the_policy_are_loaded(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        ir.save(ir.dummy(), tmp_path, "a", version)
    ir.save(ir.sum_of_two(), tmp_path, "b")
    latest = {"latest": {"num_versions": 2}}
    report = await _check(tmp_path, "b", {"name": "a", "base_path": "a", "model_version_policy": latest})
    assert report.loaded == (LoadedVersion("a", 2), LoadedVersion("a", 3), LoadedVersion("b", 1))
    assert report.problems == ()


async def test_model_that_cannot_be_batched_is_a_problem_of_its_option(tmp_path: Path) -> None:
    batching = {"max_batch_size": 4, "batch_timeout_ms": 1}
    ir.save(ir.dummy(), tmp_path, "good")
    ir.save(ir.scalar(), tmp_path, "scalar")
    models = [{"name": name, "base_path": name, "batching": batching} for name in ("good", "scalar")]
    report = await _check(tmp_path, *models)
    assert report.loaded == (LoadedVersion("good", 1),)
    assert _places(report) == [("config.json", "model_config_list[1].config.batching", "error")]
    assert "input 'b' has no batch dimension" in report.problems[0].message


async def test_problems_of_all_files_are_reported(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "good")
    ir.save(ir.dummy(), tmp_path, "mapped")
    (tmp_path / "mapped/1/mapping_config.json").write_text('{"inputs": {"b": 1}}')
    ir.save(ir.dummy(), tmp_path, "weightless")
    (tmp_path / "weightless/1/model.bin").unlink()
    (tmp_path / "corrupt/1").mkdir(parents=True)
    (tmp_path / "corrupt/1/model.xml").write_text("<net")
    (tmp_path / "corrupt/1/model.bin").touch()
    (tmp_path / "empty").mkdir()
    report = await _check(tmp_path, "good", "mapped", "weightless", "corrupt", "empty", "missing", monitor=1)
    assert report.loaded == (LoadedVersion("good", 1),)
    assert _places(report) == [
        ("config.json", "model_config_list[5].config.base_path", "error"),
        ("config.json", "monitor", "error"),
        ("model.xml", "", "error"),
        ("empty", "", "warning"),
        ("mapping_config.json", "inputs.b", "error"),
        ("1", "", "error"),
    ]
    assert (len(report.errors), len(report.warnings)) == (5, 1)


@pytest.mark.parametrize(
    ("option", "value", "message", "suggestion"),
    [
        ("shape", {"z": "(1,10)"}, "a tensor that the model does not have", ""),
        ("shape", {"x": "(1,10,3)"}, "the model does not accept the shape", ""),
        ("target_device", "CPUU", "Cannot compile model into target device", "CPU"),
        ("plugin_config", {"NUM_STREAM": "1"}, "Cannot compile model into target device", "NUM_STREAMS"),
    ],
)
async def test_setting_that_does_not_fit_the_model_is_located_in_the_configuration(
    tmp_path: Path, option: str, value: Any, message: str, suggestion: str
) -> None:
    ir.save(ir.sum_of_two(), tmp_path, "m")
    config = _config(tmp_path, {"name": "m", "base_path": "m", option: value})
    (problem,) = (await check_config(config)).problems
    assert (problem.file, problem.line) == (str(config), _line(config, f'"{option}"'))
    assert problem.path.startswith(f"model_config_list[0].config.{option}")
    assert message in problem.message
    assert suggestion in problem.suggestion


async def test_missing_version_is_a_warning(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    policy = {"specific": {"versions": [1, 4]}}
    report = await _check(tmp_path, {"name": "m", "base_path": "m", "model_version_policy": policy})
    assert report.loaded == (LoadedVersion("m", 1),)
    assert [(each.message, each.found) for each in report.warnings] == [("version 4 does not exist", "1")]


async def test_invalid_entries_are_checked_further(tmp_path: Path) -> None:
    settings = ({"name": "a", "base_path": "nowhere", "nirq": 1}, {"name": "b", "base_pth": "b"}, {"name": "c"})
    report = await _check(tmp_path, *settings)
    assert [problem.path for problem in report.problems] == [
        "model_config_list[0].config.base_path",
        "model_config_list[0].config.nirq",
        "model_config_list[1].config.base_pth",
        "model_config_list[2].config",
    ]


async def test_models_that_share_a_directory_share_its_problems(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    (tmp_path / "m/notes").mkdir()
    report = await _check(tmp_path, *({"name": name, "base_path": "m"} for name in "ab"))
    assert [problem.message for problem in report.problems] == [
        'directory "notes" is not a version: expected a positive integer'
    ]
    assert len(report.loaded) == 2


async def test_directory_of_a_model_is_checked_with_all_versions(tmp_path: Path) -> None:
    base = ir.save(ir.dummy(), tmp_path, "m", 1)
    ir.save(ir.dummy(), tmp_path, "m", 7)
    (base / "config.json").write_text("{}")
    report = await check_config(base)
    assert report.loaded == (LoadedVersion("m", 1), LoadedVersion("m", 7))
    assert report.problems == ()


async def test_directory_of_a_configuration_is_checked(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    (tmp_path / "m/2").mkdir()
    (tmp_path / "none").mkdir()
    (empty,) = (await check_config(tmp_path / "none")).errors
    assert (empty.file, empty.message) == (str(tmp_path / "none"), "the folder has nothing to serve")
    assert (await check_config(tmp_path)).loaded == (LoadedVersion("m", 1),)
    assert (await check_config(tmp_path / "m/1")).loaded == (LoadedVersion("m", 1),)
    _config(tmp_path, {"name": "called", "base_path": "m"})
    assert (await check_config(tmp_path)).loaded == (LoadedVersion("called", 1),)


async def test_unusable_configuration_is_a_problem(tmp_path: Path) -> None:
    (missing,) = (await check_config(tmp_path / "config.json")).errors
    assert missing.message == "no such file or directory"
    (tmp_path / "config.json").write_text("{,}")
    (broken,) = (await check_config(tmp_path / "config.json")).errors
    assert broken.line == 1
    assert broken.message.startswith("The file is not valid json")


NODE = """
from pathlib import Path

class OvmsPythonModel:
    def initialize(self, kwargs):
        self.folder = Path(kwargs["base_path"])

    def execute(self, inputs):
        return inputs

    def finalize(self):
        (self.folder / "finalized").touch()
"""


def _graph(folder: Path, *, text: str = "", code: str = NODE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph.pbtxt").write_text(text or graph_text(python_node("node.py")))
    (folder / "node.py").write_text(code)
    return folder


def _write_subconfig(folder: Path) -> None:
    ir.save(ir.dummy(), folder, "inner")
    (folder / "subconfig.json").write_text(
        json.dumps({"model_config_list": [{"config": {"name": "inner", "base_path": "inner"}}]})
    )


async def test_graphs_are_loaded_with_the_models_of_their_subconfigs(tmp_path: Path) -> None:
    _graph(tmp_path / "g")
    _graph(tmp_path / "h")
    _write_subconfig(tmp_path / "g")
    report = await _check(tmp_path, "h", mediapipe_config_list=[{"name": "g"}])
    assert report.problems == ()
    assert report.loaded == (LoadedVersion("g", 1), LoadedVersion("h", 1), LoadedVersion("inner", 1))
    assert (tmp_path / "g/finalized").exists()


async def test_problems_of_graphs_are_reported(tmp_path: Path) -> None:
    _graph(tmp_path / "unreadable", text='input_stream: "in\n')
    _graph(tmp_path / "subconfigured")
    (tmp_path / "subconfigured/subconfig.json").write_text("[")
    _graph(tmp_path / "raising", code=NODE.replace("self.folder = ", "raise RuntimeError"))
    _graph(tmp_path / "fine")
    names = ("missing", "unreadable", "subconfigured", "raising", "fine")
    config = _config(tmp_path, mediapipe_config_list=[{"name": name} for name in names])
    report = await check_config(config)
    assert report.loaded == (LoadedVersion("fine", 1),)
    files = {str(Path(problem.file).relative_to(tmp_path)) for problem in report.errors}
    assert {"config.json", "unreadable/graph.pbtxt", "subconfigured/subconfig.json"} <= files
    assert any(file.startswith("raising/") for file in files)
    missing = next(problem for problem in report.problems if problem.file == str(config))
    assert (missing.message, missing.line) == ("the graph's file does not exist", _line(config, '"missing"') - 1)


@pytest.mark.parametrize("place", ["", "1"])
async def test_directory_of_a_graph_is_checked(tmp_path: Path, place: str) -> None:
    _write_subconfig(_graph(tmp_path / "g" / place))
    report = await check_config(tmp_path / "g")
    assert report.problems == ()
    assert report.loaded == (LoadedVersion("g", 1), LoadedVersion("inner", 1))


async def test_configuration_in_the_directory_of_a_graph_is_checked(tmp_path: Path) -> None:
    _graph(tmp_path)
    _config(tmp_path, mediapipe_config_list=[{"name": "called", "base_path": "."}])
    report = await check_config(tmp_path)
    assert (report.loaded, report.problems) == ((LoadedVersion("called", 1),), ())


async def test_problems_of_pipelines_are_reported(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    source = {"node_name": "request", "data_item": "in"}
    given = [{"data_item": "a", "alias": "a"}]
    node = {"name": "n", "type": "custom", "library_name": "crop", "inputs": [{"in": source}], "outputs": given}
    called = {"name": "m", "type": "DL model", "model_name": "m", "inputs": [{"b": source}], "outputs": given}
    items = (("n", "a"), ("m", "a"), ("m", "b"))
    outputs = [{f"{name}.{item}": {"node_name": name, "data_item": item}} for name, item in items]
    pipeline = {"name": "p", "inputs": ["in"], "nodes": [node, called], "outputs": outputs}
    config = _config(
        tmp_path,
        {"name": "m", "base_path": "m"},
        pipeline_config_list=[pipeline],
        custom_node_library_config_list=[{"name": "crops", "base_path": "crop.py"}],
    )
    report = await check_config(config)
    assert report.loaded == (LoadedVersion("m", 1),)
    wrong_output, problem = report.problems
    assert wrong_output.message.startswith("PIPELINE_NODE_REFERING_TO_MISSING_DATA_SOURCE")
    assert (problem.line, problem.suggestion) == (_line(config, '"library_name"'), "did you mean 'crops'?")


@pytest.mark.parametrize("names", [(), ("outer",)])
async def test_pipelines_may_call_graphs_and_each_other(tmp_path: Path, names: tuple[str, ...]) -> None:
    _graph(tmp_path / "g")
    pipelines = [
        pipeline_entry("outer", "inner", "in", "out", version=3),
        pipeline_entry("inner", "g", "in", "out", version=3),
    ]
    config = _config(tmp_path, mediapipe_config_list=[{"name": "g"}], pipeline_config_list=pipelines)
    report = await check_pipelines(config, names)
    assert report.problems == ()
    assert [each.model for each in report.loaded] == ["g", "inner", "outer"]
    assert (tmp_path / "g/finalized").exists()
    assert await check_config(config) == report
    assert (await check_pipelines(config, names, load=False)).problems == ()


async def test_pipelines_that_call_each_other_in_a_cycle_are_refused(tmp_path: Path) -> None:
    pipelines = [pipeline_entry("p", "q"), pipeline_entry("q", "p")]
    report = await check_pipelines(_config(tmp_path, pipeline_config_list=pipelines))
    assert [problem.message for problem in report.problems] == [
        "PIPELINE_CALLS_ITSELF: it calls itself through others: p -> q -> p",
        "PIPELINE_CALLS_ITSELF: it calls itself through others: q -> p -> q",
    ]


async def test_unconnected_input_of_a_pipeline_is_a_warning(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    pipeline = {**pipeline_entry("p", "m"), "inputs": ["b", "z"]}
    config = _config(tmp_path, {"name": "m", "base_path": "m"}, pipeline_config_list=[pipeline])
    report = await check_config(config)
    assert [(problem.severity, problem.message) for problem in report.problems] == [
        ("warning", "PIPELINE_CONTAINS_UNCONNECTED_NODES: node 'request': the input 'z' is not used")
    ]
    assert [each.model for each in report.loaded] == ["m", "p"]
    assert (await check_pipelines(config, load=False)).problems == report.problems


async def test_model_that_crashes_openvino_is_a_problem(tmp_path: Path) -> None:
    for name, model in (("bad", ir.steps(bad=1)), ("good", ir.dummy()), ("odd", ir.steps())):
        ir.save(model, tmp_path, name)
    report = await _check(tmp_path, "bad", "good", "odd")
    assert report.loaded == (LoadedVersion("good", 1), LoadedVersion("odd", 1))
    assert _places(report) == [("model.xml", "", "error"), ("model.xml", "", "warning")]
    assert [str(tmp_path / name / "1/model.xml") for name in ("bad", "odd")] == [each.file for each in report.problems]
    assert ["SIGFPE when it runs" in each.message for each in report.problems] == [True, False]
    assert "when all inputs of the model are zeros" in report.problems[1].message


# Checks and servers


HANDLER = "class Handler:\n    def handle_post(self, payload): return payload\n"
Document = dict[str, Any]


def _site(root: Path) -> Document:
    ir.save(ir.dummy(), root, "m", 1)
    ir.save(ir.dummy(), root, "m", 2)
    for name in ("g", "caller"):
        folder = root / name
        folder.mkdir()
        (folder / "node.py").write_text(NODE)
    (root / "g/graph.pbtxt").write_text(graph_text(python_node("node.py")))
    (root / "caller/graph.pbtxt").write_text(graph_text(python_node("node.py")) + session_text("p"))
    (write(root / "h", PYTHON) / "handler.py").write_text(HANDLER)
    return {
        "model_config_list": [{"config": {"name": "m", "base_path": "m", "model_version_policy": {"all": {}}}}],
        "mediapipe_config_list": [{"name": "g"}, {"name": "caller"}],
        "pipeline_config_list": [pipeline_entry("p", "m"), pipeline_entry("outer", "p"),
                                 pipeline_entry("of_graph", "g", "in", "out")],
        "handler_config_list": [{"name": "h", "path": "h"}],
    }  # fmt: skip


def _set(*path: Any, value: Any) -> Callable[[Path, Document], None]:
    def change(root: Path, document: Document) -> None:
        del root
        inside: Any = document
        for step in path[:-1]:
            inside = inside[step]
        inside[path[-1]] = value

    return change


def _write(name: str, text: str) -> Callable[[Path, Document], None]:
    def write_file(root: Path, document: Document) -> None:
        del document
        (root / name).write_text(text)

    return write_file


def _remove(name: str) -> Callable[[Path, Document], None]:
    return lambda root, document: (root / name).unlink()


_MODEL = ("model_config_list", 0, "config")
_NODE_OF_P = ("pipeline_config_list", 0, "nodes", 0)
BREAKS: dict[str, Callable[[Path, Document], None]] = {
    "nothing": lambda root, document: None,
    "base path": _set(*_MODEL, "base_path", value="nowhere"),
    "shape": _set(*_MODEL, "shape", value="(7,7,7)"),
    "plugin config": _set(*_MODEL, "plugin_config", value={"NUM_STREAM": "1"}),
    "policy": _set(*_MODEL, "model_version_policy", value={"specific": {"versions": [1, 9]}}),
    "model": _write("m/2/model.xml", "<net"),
    "weights": _remove("m/1/model.bin"),
    "mapping": _write("m/1/mapping_config.json", "["),
    "graph file": _remove("g/graph.pbtxt"),
    "graph": _write("g/graph.pbtxt", "node {"),
    "calculator": _write("g/graph.pbtxt", 'node { calculator: "None" }'),
    "node": _write("g/node.py", "raise SystemError"),
    "session": _write("caller/graph.pbtxt", graph_text(python_node("node.py")) + session_text("missing")),
    "circle": _write("g/graph.pbtxt", graph_text(python_node("node.py")) + session_text("of_graph")),
    "called": _set(*_NODE_OF_P, "model_name", value="missing"),
    "item": _set(*_NODE_OF_P, "inputs", 0, value={"c": {"node_name": "request", "data_item": "b"}}),
    "itself": _set(*_NODE_OF_P, "model_name", value="p"),
    "each other": _set(*_NODE_OF_P, "model_name", value="outer"),
    "taken name": _set("handler_config_list", 0, "name", value="m"),
    "own path": _set("handler_config_list", 0, "name", value="v2"),
    "project": _set("handler_config_list", 0, "path", value="nowhere"),
    "project file": _write("h/nucleus.yaml", "type: python\n"),
    "processes": _write("h/nucleus.yaml", f"{PYTHON}processes: 2\n"),
    "import": _write("h/handler.py", "import nothing_of_that_name"),
    "method": _write("h/handler.py", "class Handler:\n    def handle_post(self, payloat): ...\n"),
    "constructor": _write("h/handler.py", f"{HANDLER}    def __init__(self): raise RuntimeError\n"),
}  # fmt: skip


async def _served(config: Path) -> tuple[set[LoadedVersion], set[str]]:
    spec = parse_config(KINDS.values(), await trio.Path(config).read_bytes(), config)
    async with running(Registry(KINDS, poll_seconds=0)) as registry:
        await registry.apply(spec.services)
        loaded = {
            LoadedVersion(name, version)
            for name in registry.statuses()
            for version in registry.available_versions(name)
        }
        problems = [*spec.problems, *registry.findings()]
        return loaded, {str(problem) for problem in problems if problem.severity == "error"}


@settings(max_examples=examples(15), deadline=None)
@given(broken=st.sampled_from(sorted(BREAKS)), left_out=st.sets(st.sampled_from(["mediapipe", "pipeline", "handler"])))
def test_check_and_serve_come_to_the_same_verdict(broken: str, left_out: set[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        document = _site(root)
        BREAKS[broken](root, document)
        config = root / "config.json"
        kept = {key: value for key, value in document.items() if key.split("_")[0] not in left_out}
        config.write_text(json.dumps(kept, indent=1))
        loaded, errors = trio.run(_served, config)
        report = trio.run(check_config, config)
    assert set(report.loaded) == loaded
    assert errors <= {str(problem) for problem in report.errors}
    assert bool(errors) == bool(report.errors)
    if broken == "nothing" and not left_out:
        assert len(loaded) == 8
