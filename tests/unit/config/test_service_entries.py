"""Entries of services of all kinds: keys that all kinds share, names, handlers, Op pipelines, Python processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.specs import GraphSpec, HandlerSpec, OpPipelineSpec, PythonSpec, ServerSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.work.isolation.isolated_code import Isolation
from tests.support.config_documents import CONFIG_FILE, examine_sections, fatal_problems, parse_sections

_PIPELINE = {
    "name": "p",
    "inputs": ["x"],
    "nodes": [
        {
            "name": "n",
            "model_name": "m",
            "type": "DL model",
            "inputs": [{"x": {"node_name": "request", "data_item": "x"}}],
            "outputs": [{"data_item": "y", "alias": "y"}],
        }
    ],
    "outputs": [{"y": {"node_name": "n", "data_item": "y"}}],
}
_ENTRIES: dict[str, dict[str, Any]] = {
    "model_config_list": {"name": "m", "base_path": "/m"},
    "mediapipe_config_list": {"name": "g"},
    "pipeline_config_list": _PIPELINE,
    "handler_config_list": {"name": "h", "path": "h"},
    "op_pipeline_config_list": {"name": "o", "path": "o"},
    "text_model_config_list": {"name": "t", "base_path": "/t"},
}
_NESTED = ("model_config_list", "text_model_config_list")


def _entry(section: str, **settings: Any) -> dict[str, Any]:
    entry = {**_ENTRIES[section], **settings}
    return {"config": entry} if section in _NESTED else entry


def _sections(section: str, *settings: dict[str, Any]) -> dict[str, Any]:
    return {section: [_entry(section, **each) for each in settings]}


@pytest.mark.parametrize("section", [section for section in _ENTRIES if section != "text_model_config_list"])
def test_limits_of_calls_are_read_and_need_no_reload(section: str) -> None:
    default, concurrency, both = [
        parse_sections(**_sections(section, limits)).services[-1]
        for limits in ({}, {"max_concurrency": 3}, {"max_concurrency": 3, "max_queue": 0})
    ]
    assert [(spec.max_concurrency, spec.max_queue) for spec in (default, concurrency, both)] == [
        (0, 100),
        (3, 100),
        (3, 0),
    ]
    assert not default.needs_reload(both)


@pytest.mark.parametrize("section", [section for section in _ENTRIES if section != "text_model_config_list"])
def test_limits_without_effect_are_warnings_and_negative_limits_are_fatal(section: str) -> None:
    spec = parse_sections(**_sections(section, {"max_queue": 5}))
    (problem,) = [problem for problem in spec.problems if problem.path.endswith("max_queue")]
    assert (problem.severity, problem.line is not None) == ("warning", True)
    (fatal,) = fatal_problems(**_sections(section, {"max_concurrency": -1}))
    assert (fatal.expected, fatal.found) == ("0 or more", "-1")


@pytest.mark.parametrize(
    ("section", "line", "path"),
    [
        ("model_config_list", 4, "model_config_list[0].config"),
        ("mediapipe_config_list", 4, "mediapipe_config_list[0]"),
        ("pipeline_config_list", 4, "pipeline_config_list[0]"),
        ("handler_config_list", 4, "handler_config_list[0]"),
        ("op_pipeline_config_list", 4, "op_pipeline_config_list[0]"),
        ("text_model_config_list", 5, "text_model_config_list[0].config"),
    ],
)
def test_a_service_has_the_place_of_its_entry(section: str, line: int, path: str) -> None:
    (spec,) = examine_sections(**_sections(section, {})).spec.services
    assert spec.place is not None
    assert (spec.place.file, spec.place.settings.line, spec.place.settings.path) == (str(CONFIG_FILE), line, path)


@pytest.mark.parametrize(
    ("section", "severity"),
    [(section, "error" if section == "model_config_list" else "warning") for section in _ENTRIES],
)
def test_the_first_of_two_entries_with_one_name_is_served(section: str, severity: str) -> None:
    spec = parse_sections(**_sections(section, {}, {"max_concurrency": 1}))
    assert [each.max_concurrency for each in spec.services] == [0]
    (problem,) = spec.problems
    assert (problem.severity, problem.path.partition("]")[0]) == (severity, f"{section}[1")
    assert problem.path.endswith(".name")


@pytest.mark.parametrize(
    ("section", "other", "message"),
    [
        ("mediapipe_config_list", "model", "Given mediapipe graph name is already occupied: 'm' is a model's"),
        ("pipeline_config_list", "model", "Pipeline has the same name as model: 'm' is a model's"),
        ("handler_config_list", "model", "Handler has a name that is taken: 'm' is a model's"),
        ("text_model_config_list", "model", "Text model has a name that is taken: 'm' is a model's"),
        ("mediapipe_config_list", "pipeline", "Given mediapipe graph name is already occupied: 'p' is a pipeline's"),
        ("op_pipeline_config_list", "handler", "Op pipeline has a name that is taken: 'h' is a handler's"),
    ],
)
def test_a_name_of_another_kind_is_taken(section: str, other: str, message: str) -> None:
    entry = _ENTRIES[f"{other}_config_list"]
    sections = _sections(f"{other}_config_list", {}) | _sections(section, {"name": entry["name"]}, {"name": "free"})
    spec = parse_sections(**sections)
    assert [service.name for service in spec.services if service.kind == other] == [entry["name"]]
    assert [service.name for service in spec.services if service.kind != other] == ["free"]
    (problem,) = spec.problems
    assert (problem.severity, problem.path.endswith(".name")) == ("error", True)
    assert problem.message == f"{message}, which is served"


def test_a_handler_is_a_folder_or_a_file() -> None:
    entries = [{"name": "iris", "path": "iris"}, {"name": "other", "path": "/srv/other/mine.yaml"}]
    spec = parse_sections(handler_config_list=entries)
    assert tuple(each.model_copy(update={"place": None}) for each in spec.services) == (
        HandlerSpec(
            name="iris", base_path=Path("/etc/ovms/iris"), path=Path("/etc/ovms/iris"), origin=f"{CONFIG_FILE}:4"
        ),
        HandlerSpec(
            name="other",
            base_path=Path("/srv/other"),
            path=Path("/srv/other/mine.yaml"),
            origin=f"{CONFIG_FILE}:8",
        ),
    )
    assert spec.problems == ()


@pytest.mark.parametrize(
    ("entry", "config", "script"),
    [
        ({"path": "uci"}, "uci/config.yml", "uci/web_service.py"),
        ({"path": "uci/other.yaml"}, "uci/other.yaml", "uci/web_service.py"),
        ({"path": "uci", "service": "scripts/s.py"}, "uci/config.yml", "scripts/s.py"),
        ({"path": "/srv/uci", "service": "/srv/s.py"}, "/srv/uci/config.yml", "/srv/s.py"),
    ],
)
def test_an_op_pipeline_is_a_configuration_and_a_script(entry: dict[str, str], config: str, script: str) -> None:
    (spec,) = parse_sections(op_pipeline_config_list=[{"name": "uci", **entry}]).of(OpPipelineSpec)
    assert (spec.name, spec.problems, spec.origin) == ("uci", (), f"{CONFIG_FILE}:4")
    assert (spec.config, spec.script) == (CONFIG_FILE.parent / config, CONFIG_FILE.parent / script)
    assert spec.base_path == (CONFIG_FILE.parent / config).parent


@pytest.mark.parametrize(
    ("section", "entry", "key", "message"),
    [
        ("handler", {"name": ""}, "name", "the name is empty"),
        ("handler", {"name": "v2"}, "name", "the name is the beginning of the server's own paths"),
        ("handler", {"name": "v3"}, "name", "the name is the beginning of the server's own paths"),
        ("handler", {"name": "health"}, "name", "the name is the beginning of the server's own paths"),
        ("handler", {"name": "a/b"}, "name", "the name cannot be used"),
        ("handler", {"path": ""}, "path", "the path is empty"),
        ("handler", {"path": "s3://b/a"}, "path", "remote storage is not served"),
        ("handler", {"path": "a\0"}, "path", "the path cannot be used"),
        ("handler", {"python": "none/bin/python"}, "python", "there is no such interpreter"),
        ("op_pipeline", {"name": "metrics"}, "name", "the name is the beginning of the server's own paths"),
        ("op_pipeline", {"name": "a/b"}, "name", "the name cannot be used"),
        ("op_pipeline", {"path": ""}, "path", "the path is empty"),
        ("op_pipeline", {"path": "s3://b"}, "path", "remote storage is not served"),
        ("op_pipeline", {"service": ""}, "service", "the service is empty"),
        ("op_pipeline", {"service": "a\0"}, "service", "the path cannot be used"),
    ],
)
def test_an_unusable_value_fails_only_its_service(section: str, entry: dict[str, str], key: str, message: str) -> None:
    spec = parse_sections(**_sections(f"{section}_config_list", entry, {"name": "other"}))
    failed, other = spec.services
    (problem,) = failed.problems
    assert problem.path == f"{section}_config_list[0].{key}"
    assert problem.message.startswith(message)
    assert problem.line is not None
    assert other.problems == ()


@pytest.mark.parametrize(
    ("section", "entry", "problems"),
    [
        ("handler", {"name": "a"}, [("", "the key 'path' is missing")]),
        ("handler", {"name": "a", "path": 3}, [(".path", "wrong type or value")]),
        ("handler", {"name": "a", "path": "a", "port": 1}, [(".port", "unknown key 'port'")]),
        ("handler", "a", [("", "wrong type or value")]),
        (
            "op_pipeline",
            {"name": "a", "script": "b"},
            [("", "the key 'path' is missing"), (".script", "unknown key 'script'")],
        ),
    ],
)
def test_a_wrong_form_makes_the_file_unusable(section: str, entry: Any, problems: list[tuple[str, str]]) -> None:
    section = f"{section}_config_list"
    found = [(problem.path, problem.message) for problem in fatal_problems(**{section: [entry]})]
    assert found == [(f"{section}[0]{path}", message) for path, message in problems]


def test_problems_of_the_file_and_of_services_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_sections(handler_config_list=[{"name": "a", "path": ""}], monitoring={"metrics": {"enable": 1}})
    assert {problem.path for problem in caught.value.problems} == {
        "monitoring.metrics.enable",
        "handler_config_list[0].path",
    }


def _graph(folder: Path, **settings: Any) -> ServerSpec:
    return parse_sections(folder / "config.json", mediapipe_config_list=[{"name": "g", **settings}])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PythonSpec()),
        ({"python_isolation": "none"}, PythonSpec(isolation="none")),
        ({"python_isolation": "process"}, PythonSpec(isolation="process")),
        ({"python_processes": 4}, PythonSpec(isolation="process", processes=4)),
        ({"python_timeout_seconds": 5}, PythonSpec(isolation="process", timeout_seconds=5)),
        ({"python_memory_limit": 0}, PythonSpec(isolation="process", memory_limit=0)),
        ({"python": sys.executable}, PythonSpec(isolation="process", python=Path(sys.executable))),
    ],
)
@pytest.mark.parametrize("section", ["mediapipe_config_list", "handler_config_list"])
def test_settings_of_python_processes_turn_isolation_on(
    section: str, settings: dict[str, Any], expected: PythonSpec
) -> None:
    (spec,) = parse_sections(**_sections(section, settings)).services
    assert isinstance(spec, GraphSpec | HandlerSpec)
    assert (spec.python, spec.problems) == (expected, ())


def test_the_path_of_an_interpreter_is_relative_to_the_file_and_stays_a_link(tmp_path: Path) -> None:
    """A virtual environment finds its packages by the path of the link."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (graph,) = _graph(tmp_path, python="venv/bin/python").of(GraphSpec)
    assert graph.python.python == python


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        ({"python": "venv/bin/python"}, "python", "which does not exist"),
        ({"python": "config.json"}, "python", "which cannot be run"),
        ({"python_isolation": "none", "python_processes": 2}, "python_processes", "set python_isolation to process"),
    ],
)
def test_unusable_python_settings_fail_the_graph(
    tmp_path: Path, settings: dict[str, Any], path: str, message: str
) -> None:
    (tmp_path / "config.json").touch()
    (graph,) = _graph(tmp_path, **settings).of(GraphSpec)
    (problem,) = graph.problems
    assert problem.path == f"mediapipe_config_list[0].{path}"
    assert (problem.file, problem.line) == (f"{tmp_path}/config.json", 6 + list(settings).index(path))
    assert message in str(problem)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("python_isolation", "thread"),
        ("python_processes", 0),
        ("python_timeout_seconds", -1),
        ("python_memory_limit", "1G"),
        ("python", 3),
    ],
)
def test_python_settings_of_a_wrong_form_make_the_file_unusable(key: str, value: Any) -> None:
    (problem,) = fatal_problems(**_sections("mediapipe_config_list", {key: value}))
    assert problem.path == f"mediapipe_config_list[0].{key}"


def test_the_server_supplies_the_isolation_and_the_memory_limit_that_an_entry_omits() -> None:
    own = PythonSpec(isolation="process", memory_limit=5, processes=2, timeout_seconds=3)
    assert Isolation.of(PythonSpec(), is_default=False, memory_limit=9) is None
    assert Isolation.of(PythonSpec(isolation="none"), is_default=True, memory_limit=9) is None
    assert Isolation.of(PythonSpec(), is_default=True, memory_limit=9) == Isolation(memory_limit=9)
    assert Isolation.of(own, is_default=False, memory_limit=9) == Isolation(2, None, 3, 5)


def test_a_change_of_python_settings_needs_a_reload() -> None:
    plain = GraphSpec(name="g", base_path=Path("g"), graph_path=Path("g/graph.pbtxt"))
    assert plain.needs_reload(plain.model_copy(update={"python": PythonSpec(isolation="process")}))
