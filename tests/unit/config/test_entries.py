from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from ovmstrio.config.specs import (
    GraphSpec,
    HandlerSpec,
    ModelSpec,
    OpPipelineSpec,
    PythonSpec,
    ServerSpec,
    TextModelSpec,
)
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.isolation.isolated_code import Isolation
from ovmstrio.server.command_line import UsageError, read_settings, single_servable_spec
from ovmstrio.server.settings import ServerSettings
from tests.support.config_documents import CONFIG_FILE, examine_sections, fatal_problems, parse_sections

_ENTRIES: dict[str, dict[str, Any]] = {
    "model_config_list": {"name": "m", "base_path": "/m"},
    "mediapipe_config_list": {"name": "g"},
    "pipeline_config_list": {"name": "p", "inputs": [], "nodes": [], "outputs": []},
    "handler_config_list": {"name": "h", "path": "h"},
    "op_pipeline_config_list": {"name": "o", "path": "o"},
    "text_model_config_list": {"name": "t", "base_path": "/t"},
}
_CHAT = {"name": "chat", "base_path": "models/chat"}
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
    for seconds in (0, 0.5, 3):
        limits = {"max_concurrency": 3, "max_queue_time": seconds}
        spec = parse_sections(**_sections(section, limits)).services[-1]
        assert (spec.max_queue_time, default.max_queue_time, spec.problems) == (seconds, None, ())
        assert not default.needs_reload(spec)


@pytest.mark.parametrize("section", _ENTRIES)
def test_services_are_required_unless_their_entry_says_otherwise(section: str) -> None:
    default, required, optional = [
        parse_sections(**_sections(section, given)).services[-1]
        for given in ({}, {"required": True}, {"required": False})
    ]
    assert [spec.required for spec in (default, required, optional)] == [True, True, False]
    assert not default.needs_reload(optional)
    (fatal,) = fatal_problems(**_sections(section, {"required": 0}))
    assert fatal.path.endswith("required")


def test_a_model_of_another_server_may_be_optional() -> None:
    entry = {"config": {"name": "r", "remote": "grpc://a:1", "required": False}}
    assert [spec.required for spec in parse_sections(model_config_list=[entry]).services] == [False]


@pytest.mark.parametrize("section", [section for section in _ENTRIES if section != "text_model_config_list"])
def test_limits_without_effect_are_warnings_and_negative_limits_are_fatal(section: str) -> None:
    spec = parse_sections(**_sections(section, {"max_queue": 5}))
    (problem,) = [problem for problem in spec.problems if problem.path.endswith("max_queue")]
    assert (problem.severity, problem.line is not None) == ("warning", True)
    spec = parse_sections(**_sections(section, {"max_queue_time": 0.5}))
    (problem,) = [problem for problem in spec.problems if problem.path.endswith("max_queue_time")]
    assert (problem.severity, problem.message) == ("warning", "max_queue_time has no effect without max_concurrency")
    (fatal,) = fatal_problems(**_sections(section, {"max_concurrency": 1, "max_queue_time": -0.5}))
    assert (fatal.expected, fatal.found) == ("a number of 0 or more", "-0.5")
    (fatal,) = fatal_problems(**_sections(section, {"max_concurrency": -1}))
    assert (fatal.expected, fatal.found) == ("an integer of 0 or more", "-1")


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
        ("handler", {"name": "v2"}, "name", "the name is reserved for the server's paths"),
        ("handler", {"name": "v3"}, "name", "the name is reserved for the server's paths"),
        ("handler", {"name": "health"}, "name", "the name is reserved for the server's paths"),
        ("handler", {"name": "a/b"}, "name", "the name cannot be used"),
        ("handler", {"path": ""}, "path", "the path is empty"),
        ("handler", {"path": "s3://b/a"}, "path", "remote storage is not supported"),
        ("handler", {"path": "a\0"}, "path", "the path cannot be used"),
        ("handler", {"python": "none/bin/python"}, "python", "Python interpreter not found"),
        ("mediapipe", {"name": ""}, "name", "the name is empty"),
        ("mediapipe", {"base_path": "azfs://share/g"}, "base_path", "remote storage is not supported"),
        ("mediapipe", {"graph_path": "g\0"}, "graph_path", "the path cannot be used"),
        ("mediapipe", {"subconfig": "gs://bucket/s.json"}, "subconfig", "remote storage is not supported"),
        ("op_pipeline", {"name": "metrics"}, "name", "the name is reserved for the server's paths"),
        ("op_pipeline", {"name": "a/b"}, "name", "the name cannot be used"),
        ("op_pipeline", {"path": ""}, "path", "the path is empty"),
        ("op_pipeline", {"path": "s3://b"}, "path", "remote storage is not supported"),
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
        ("handler", {"name": "a", "path": 3}, [(".path", "the value cannot be used")]),
        ("handler", {"name": "a", "path": "a", "port": 1}, [(".port", "unknown key 'port'")]),
        ("handler", "a", [("", "the value cannot be used")]),
        (
            "op_pipeline",
            {"name": "a", "script": "b"},
            [("", "the key 'path' is missing"), (".script", "unknown key 'script'")],
        ),
        ("mediapipe", {}, [("", "the key 'name' is missing")]),
        ("mediapipe", {"name": 1}, [(".name", "the value cannot be used")]),
        ("mediapipe", {"name": "g", "nireq": 1}, [(".nireq", "unknown key 'nireq'")]),
        ("mediapipe", {"name": "g", "graph_pth": "x"}, [(".graph_pth", "unknown key 'graph_pth'")]),
        ("mediapipe", {"name": "g", "python_isolation": "thread"}, [(".python_isolation", "the value cannot be used")]),
        ("mediapipe", {"name": "g", "python_processes": 0}, [(".python_processes", "the value cannot be used")]),
        (
            "mediapipe",
            {"name": "g", "python_timeout_seconds": -1},
            [(".python_timeout_seconds", "the value cannot be used")],
        ),
        (
            "mediapipe",
            {"name": "g", "python_memory_limit": "1G"},
            [(".python_memory_limit", "the value cannot be used")],
        ),
        ("mediapipe", {"name": "g", "python": 3}, [(".python", "the value cannot be used")]),
        ("text_model", {"config": {**_CHAT, "cache_sise": 4}}, [(".config.cache_sise", "unknown key 'cache_sise'")]),
        (
            "text_model",
            {"config": {**_CHAT, "max_num_seqs": "8"}},
            [(".config.max_num_seqs", "the value cannot be used")],
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


def _graphs(folder: Path, *entries: dict[str, Any]) -> ServerSpec:
    return parse_sections(folder / "config.json", mediapipe_config_list=list(entries))


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
    assert spec.needs_reload(spec.model_copy(update={"python": PythonSpec(processes=9)}))


def test_the_path_of_an_interpreter_is_relative_to_the_file_and_stays_a_link(tmp_path: Path) -> None:
    """A virtual environment finds its packages by the path of the link."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (graph,) = _graphs(tmp_path, {"name": "g", "python": "venv/bin/python"}).of(GraphSpec)
    assert graph.python.python == python


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        ({"python": "venv/bin/python"}, "python", "which does not exist"),
        ({"python": "config.json"}, "python", "which is not executable"),
        ({"python_isolation": "none", "python_processes": 2}, "python_processes", "set python_isolation to process"),
    ],
)
def test_unusable_python_settings_fail_the_graph(
    tmp_path: Path, settings: dict[str, Any], path: str, message: str
) -> None:
    (tmp_path / "config.json").touch()
    (graph,) = _graphs(tmp_path, {"name": "g", **settings}).of(GraphSpec)
    (problem,) = graph.problems
    assert problem.path == f"mediapipe_config_list[0].{path}"
    assert (problem.file, problem.line) == (f"{tmp_path}/config.json", 6 + list(settings).index(path))
    assert message in str(problem)


def test_the_server_supplies_the_isolation_and_the_memory_limit_that_an_entry_omits() -> None:
    own = PythonSpec(isolation="process", memory_limit=5, processes=2, timeout_seconds=3)
    assert Isolation.of(PythonSpec(), is_default=False, memory_limit=9) is None
    assert Isolation.of(PythonSpec(isolation="none"), is_default=True, memory_limit=9) is None
    assert Isolation.of(PythonSpec(), is_default=True, memory_limit=9) == Isolation(memory_limit=9)
    assert Isolation.of(own, is_default=False, memory_limit=9) == Isolation(2, None, 3, 5)


def _write(path: Path, document: Any = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document, indent=1))


def _models(*configs: dict[str, Any]) -> dict[str, Any]:
    return {"model_config_list": [{"config": config} for config in configs]}


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
    spec = parse_sections(
        tmp_path / "config.json", **_models({"name": "g", **settings}, {"name": "m", "base_path": "m"})
    )
    assert [graph.base_path for graph in spec.of(GraphSpec)] == [tmp_path / base_path]
    assert [model.name for model in spec.of(ModelSpec)] == ["m"]
    assert spec.problems == ()


def test_a_model_option_on_a_graph_is_a_warning(tmp_path: Path) -> None:
    _write(tmp_path / "g/graph.pbtxt")
    spec = parse_sections(tmp_path / "config.json", **_models({"name": "g", "base_path": "g", "nireq": 2}))
    (problem,) = spec.problems
    assert (problem.severity, problem.path, problem.line) == ("warning", "model_config_list[0].config.nireq", 7)
    assert spec.of(GraphSpec)[0].problems == ()


def test_a_graph_of_the_model_list_takes_its_name_first(tmp_path: Path) -> None:
    _write(tmp_path / "a/graph.pbtxt")
    graphs = {"mediapipe_config_list": [{"name": "g", "base_path": "b"}]}
    spec = parse_sections(tmp_path / "config.json", **{**_models({"name": "g", "base_path": "a"}), **graphs})
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
    assert model.place is not None
    assert (model.place.file, model.place.settings.line) == (f"{tmp_path}/g/subconfig.json", 4)
    assert spec.dependencies == {
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
    spec = parse_sections(tmp_path / "config.json", **{**_models(same, other), **graphs})
    assert [(model.name, model.nireq) for model in spec.of(ModelSpec)] == [("same", 0), ("other", 0)]
    (problem,) = spec.problems
    assert (problem.severity, problem.file) == ("warning", f"{tmp_path}/g/subconfig.json")
    assert problem.suggestion == f"first defined in {tmp_path}/config.json:10"


def test_a_graph_in_a_subconfig_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "g/subconfig.json", _models({"name": "x", "graph_path": "x.pbtxt"}))
    spec = _graphs(tmp_path, {"name": "g"})
    assert [graph.name for graph in spec.of(GraphSpec)] == ["g"]
    assert [(problem.severity, problem.path) for problem in spec.problems] == [("error", "model_config_list[0].config")]


def _parse_texts(*models: Any) -> ServerSpec:
    return parse_sections(text_model_config_list=[{"config": each} for each in models])


def _text_model(**options: Any) -> TextModelSpec:
    (spec,) = _parse_texts({**_CHAT, **options}).of(TextModelSpec)
    return spec


def _text_problem(**options: Any) -> Problem:
    (problem,) = _text_model(**options).problems
    assert problem.file == str(CONFIG_FILE)
    assert problem.line is not None
    return problem


def test_a_model_is_a_folder_or_a_file_with_the_task_text_generation_by_default() -> None:
    folder, file = _parse_texts(_CHAT, {"name": "e", "base_path": "/m/e.gguf", "task": "embeddings"}).of(TextModelSpec)
    assert (folder.path, folder.task, folder.problems) == (Path("/etc/ovms/models/chat"), Task.TEXT_GENERATION, ())
    assert (file.path, file.base_path, file.task) == (Path("/m/e.gguf"), Path("/m"), Task.EMBEDDINGS)
    assert folder.enable_prefix_caching


_TEXT_FILES: Final = ("openvino_model.xml", "openvino_tokenizer.xml")
_IMAGE_MODEL_FILES: Final = (
    *("openvino_language_model.xml", "openvino_text_embeddings_model.xml", "openvino_vision_embeddings_model.xml"),
    *("openvino_tokenizer.xml", "openvino_detokenizer.xml"),
)
_SPEECH_FILES: Final = ("openvino_encoder_model.xml", "openvino_decoder_model.xml", "openvino_tokenizer.xml")


@pytest.mark.parametrize(
    ("files", "architecture", "task"),
    [
        ((*_TEXT_FILES, "openvino_detokenizer.xml"), None, Task.TEXT_GENERATION),
        ((*_TEXT_FILES, "openvino_detokenizer.xml"), "LlamaForCausalLM", Task.TEXT_GENERATION),
        ((*_TEXT_FILES, "openvino_detokenizer.xml"), "GPT2LMHeadModel", Task.TEXT_GENERATION),
        ((*_TEXT_FILES, "openvino_detokenizer.xml"), "XLMRobertaModel", Task.EMBEDDINGS),
        ((*_TEXT_FILES, "openvino_detokenizer.xml"), "XLMRobertaForSequenceClassification", Task.RERANK),
        ((*_TEXT_FILES, "openvino_detokenizer.xml", "1_Pooling/config.json"), "Qwen3ForCausalLM", Task.EMBEDDINGS),
        ((*_TEXT_FILES, "1_Pooling/config.json"), None, Task.EMBEDDINGS),
        (_TEXT_FILES, "BertModel", Task.EMBEDDINGS),
        (_TEXT_FILES, "BertForMaskedLM", Task.EMBEDDINGS),
        ((*_SPEECH_FILES, "openvino_detokenizer.xml"), "WhisperForConditionalGeneration", Task.SPEECH_TO_TEXT),
        ((*_SPEECH_FILES, "openvino_postnet.xml"), "SpeechT5ForTextToSpeech", Task.TEXT_TO_SPEECH),
        (("model_index.json",), "", Task.IMAGE_GENERATION),
        (_IMAGE_MODEL_FILES, "LlavaForConditionalGeneration", Task.TEXT_GENERATION),
        (_IMAGE_MODEL_FILES, None, Task.TEXT_GENERATION),
    ],
)
def test_the_task_is_detected_from_the_files(
    tmp_path: Path, files: tuple[str, ...], architecture: str | None, task: Task
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    for name in files:
        (tmp_path / name).write_text("{}")
    if architecture:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    models = {"name": "m", "base_path": str(tmp_path)}, {"name": "n", "base_path": str(tmp_path), "task": "rerank"}
    detected, given = _parse_texts(*models).of(TextModelSpec)
    assert (detected.task, given.task) == (task, Task.RERANK)
    settings = ServerSettings(model_name="m", model_path=tmp_path)
    (served,) = single_servable_spec(settings).services
    assert isinstance(served, TextModelSpec)
    assert served.task == task


@pytest.mark.parametrize(
    ("name", "architecture", "task"),
    [
        ("Qwen3-Embedding-0.6B-int8-ov", "Qwen3ForCausalLM", Task.EMBEDDINGS),
        ("Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", Task.RERANK),
        ("Qwen3-8B-int4-ov", "Qwen3ForCausalLM", Task.TEXT_GENERATION),
        ("Embedded-Llama", "LlamaForCausalLM", Task.TEXT_GENERATION),
    ],
)
def test_the_name_of_the_folder_decides_for_an_architecture_of_any_task(
    tmp_path: Path, name: str, architecture: str, task: Task
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for each in (*_TEXT_FILES, "openvino_detokenizer.xml"):
        (folder / each).write_text("")
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (found,) = _parse_texts({"name": "m", "base_path": str(folder)}).of(TextModelSpec)
    assert found.task == task


@pytest.mark.parametrize(
    ("files", "architecture"),
    [
        (_TEXT_FILES, None),
        (_TEXT_FILES, "LlamaForCausalLM"),
        (("openvino_model.xml",), "BertModel"),
        ((*_SPEECH_FILES, "openvino_detokenizer.xml"), "T5ForConditionalGeneration"),
        ((), None),
    ],
)
def test_a_folder_of_no_known_task_is_a_tensor_model(
    tmp_path: Path, files: tuple[str, ...], architecture: str | None
) -> None:
    for name in files:
        (tmp_path / name).write_text("")
    if architecture:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (served,) = single_servable_spec(ServerSettings(model_name="m", model_path=tmp_path)).services
    assert isinstance(served, ModelSpec)


def test_options_become_fields_of_the_model() -> None:
    spec = _text_model(
        target_device="GPU",
        plugin_config={"prompt_lookup": True},
        kv_cache_precision="u8",
        cache_size=4,
        max_num_seqs=8,
        enable_prefix_caching=False,
        tool_parser="hermes3",
        idle_unload_seconds=300,
        pipeline_type="LM_CB",
    )
    assert spec.problems == ()
    assert spec.device == "GPU"
    assert spec.plugin_config == {"prompt_lookup": True, "KV_CACHE_PRECISION": "u8"}
    assert (spec.cache_size, spec.max_num_seqs, spec.enable_prefix_caching) == (4, 8, False)
    assert (spec.tool_parser, spec.idle_unload_seconds) == ("hermes3", 300)


def _adapted(**options: Any) -> list[tuple[Any, ...]]:
    models = _parse_texts({"name": "m", "base_path": "models/m", "max_num_seqs": 8, **options}).of(TextModelSpec)
    adapters = [each.adapter for each in models]
    assert [each.max_num_seqs for each in models] == [8] * len(models)
    assert [each.max_concurrency for each in models] == [3] * len(models)
    paths = [None if each is None else (str(each.path), each.alpha) for each in adapters]
    return [(each.name, each.parent, path) for each, path in zip(models, paths, strict=True)]


def test_adapters_become_models_with_the_options_of_their_model() -> None:
    adapters = [{"name": "sql", "path": "adapters/sql"}, {"name": "fr", "path": "/fr.safetensors", "alpha": 0.5}]
    assert _adapted(lora_adapters=adapters, max_concurrency=3) == [
        ("m", "", None),
        ("sql", "m", ("/etc/ovms/adapters/sql", 1.0)),
        ("fr", "m", ("/fr.safetensors", 0.5)),
    ]


@pytest.mark.parametrize(
    "given", ["sql=/sql, fr=/fr", '[{"name": "sql", "path": "/sql"}, {"name": "fr", "path": "/fr"}]']
)
def test_adapters_of_the_command_line(tmp_path: Path, given: str) -> None:
    settings = ServerSettings(model_name="m", model_path=tmp_path, task="text_generation", lora_adapters=given)
    models = single_servable_spec(settings).of(TextModelSpec)
    assert [(each.name, each.parent) for each in models] == [("m", ""), ("sql", "m"), ("fr", "m")]
    assert [each.adapter and str(each.adapter.path) for each in models] == [None, "/sql", "/fr"]


@pytest.mark.parametrize("given", ["sql", "[1", '[{"name": "sql"}]', '[{"name": "sql", "path": "a", "rank": 4}]'])
def test_unusable_adapters_of_the_command_line_are_a_problem_of_the_option(tmp_path: Path, given: str) -> None:
    options = {"model_name": "m", "model_path": tmp_path, "task": "text_generation", "lora_adapters": given}
    with pytest.raises(UsageError, match=r"--lora[-_]adapters"):
        read_settings(options)


def test_adapter_with_a_name_that_is_taken_is_refused() -> None:
    parsed = _parse_texts(
        {"name": "m", "base_path": "models/m", "lora_adapters": [{"name": "n", "path": "a"}]},
        {"name": "n", "base_path": "models/n"},
    )
    assert [(each.name, each.parent) for each in parsed.of(TextModelSpec)] == [("m", ""), ("n", "m")]
    assert "'n' is a text model's, which is served" in str(parsed.problems[0])


def test_voices_and_speeds_of_speech_models() -> None:
    speech = {"task": "text2speech"}
    spec = _text_model(**speech, voices={"anna": "voices/anna.bin"}, speed_min=0.5, speed_max=2, idle_unload_seconds=9)
    assert spec.problems == ()
    assert spec.voices == {"anna": Path("/etc/ovms/voices/anna.bin")}
    assert (spec.speed_min, spec.speed_max, spec.idle_unload_seconds) == (0.5, 2, 9)
    assert "expected an object such as" in str(_text_problem(**speech, voices={"anna": 5}))
    assert "speed_min (0.25) must be <= speed_max (0.1)" in str(_text_problem(**speech, speed_max=0.1))
    assert "models for text2speech" in str(_text_problem(voices={"anna": "anna.bin"}))


def test_limits_of_image_models() -> None:
    images = {"task": "image_generation"}
    spec = _text_model(**images, max_resolution="1024x768", default_resolution="512x512", max_num_inference_steps=60)
    assert spec.problems == ()
    assert (spec.max_resolution, spec.default_resolution) == ("1024x768", "512x512")
    assert (spec.default_num_inference_steps, spec.max_num_inference_steps) == (50, 60)
    for options, message in (
        ({"max_resolution": "1024"}, "WIDTHxHEIGHT such as 512x512"),
        ({"resolution": ""}, "WIDTHxHEIGHT such as 512x512"),
        ({"max_num_inference_steps": 9}, "default_num_inference_steps (50) must be <= max_num_inference_steps (9)"),
        ({"default_resolution": "512x8192"}, "exceeds max_resolution (4096x4096)"),
        ({"resolution": "64x64 96x96", "default_resolution": "32x32"}, "is not one of resolution"),
        ({"num_images_per_prompt": 2}, "requires a single resolution"),
        ({"resolution": "64x64 96x96", "guidance_scale": 2}, "requires a single resolution"),
    ):
        assert message in str(_text_problem(**images, **options)), options


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"task": "embedings"}, "task", "did you mean 'embeddings'?"),
        ({"max_num_seqs": 0}, "max_num_seqs", "an integer of 1 to 2147483647"),
        ({"cache_size": -1}, "cache_size", "a number of 0 to 1048576"),
        ({"pooling": "CLS"}, "pooling", "is an option of models for embeddings"),
        ({"task": "embeddings", "pooling": "mean"}, "pooling", "did you mean 'MEAN'?"),
        ({"task": "rerank", "cache_size": 4}, "cache_size", "is an option of models for text_generation"),
        (
            {"task": "embeddings", "idle_unload_seconds": 9},
            "idle_unload_seconds",
            "of models for image_generation, speech2text, text2speech, text_generation",
        ),
        ({"lora_adapters": [{"name": "a/..", "path": "a"}]}, "lora_adapters[0].name", "cannot be used"),
        ({"plugin_config": {"mtp_mode": True}}, "plugin_config.mtp_mode", "multi-token prediction"),
        ({"draft_eagle3_mode": True}, "draft_eagle3_mode", "needs draft_models_path"),
        ({"num_assistant_tokens": 3}, "num_assistant_tokens", "needs draft_models_path or prompt_lookup"),
        (
            {"draft_models_path": "d", "prompt_lookup": True},
            "draft_models_path",
            "cannot be combined with prompt_lookup",
        ),
        ({"task": "embeddings", "lora_adapters": []}, "lora_adapters", "of models for text_generation"),
        ({"pipeline_type": "OMNI"}, "pipeline_type", "sound of requests and of answers is not supported"),
        ({"pipeline_type": "LMCB"}, "pipeline_type", "did you mean 'LM_CB'?"),
        ({"plugin_config": {"A": [1]}}, "plugin_config.A", "a text, a number, true or false"),
        ({"chat_template_mode": "jinja"}, "chat_template_mode", "did you mean 'JINJA'?"),
        ({"name": ""}, "name", "the name is empty"),
        ({"base_path": "azfs://share/m"}, "base_path", "remote storage"),
    ],
)
def test_an_unusable_value_fails_only_its_model(options: dict[str, Any], key: str, message: str) -> None:
    problem = _text_problem(**options)
    assert problem.path == f"text_model_config_list[0].config.{key}"
    assert message in str(problem)


def test_all_problems_of_a_model_are_reported() -> None:
    paths = [problem.path for problem in _text_model(max_num_seqs=0, best_of_limit=0, pooling="CLS").problems]
    assert [path.rpartition(".")[2] for path in paths] == ["max_num_seqs", "best_of_limit", "pooling"]


# The registry and admission look these up at each call.
_NOT_LOADED = {"version_policy", "origin", "place", "problems", "max_concurrency", "placement", "required", "sources"}


# The changed value has another type than some fields.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("field", TextModelSpec.model_fields)
def test_a_changed_setting_needs_a_reload_unless_it_applies_per_call(field: str) -> None:
    spec = _text_model()
    assert spec.needs_reload(spec.model_copy(update={field: "changed"})) is (field not in _NOT_LOADED)
    assert not spec.needs_reload(spec.model_copy())


@pytest.mark.parametrize("section", ["mediapipe_config_list", "text_model_config_list"])
def test_the_queue_limit_is_read_from_both_lists(tmp_path: Path, section: str) -> None:
    options = '{ [type.googleapis.com/mediapipe.LLMCalculatorOptions]: { models_path: "./" } }'
    streams = 'input_stream: "HTTP_REQUEST_PAYLOAD:input" output_stream: "HTTP_RESPONSE_PAYLOAD:output"'
    node = f'node {{ calculator: "HttpLLMCalculator" {streams} node_options: {options} }}'
    (tmp_path / "graph.pbtxt").write_text(f"{streams}\n{node}\n")
    entry: Any = {"name": "chat", "base_path": str(tmp_path), "max_queue": 3, "max_queue_time": 1.5}
    sections = {section: [entry if section.startswith("mediapipe") else {"config": entry}]}
    spec = parse_sections(tmp_path / "config.json", **sections)
    (model,) = spec.of(TextModelSpec)
    assert (model.max_queue, model.max_queue_time, spec.problems) == (3, 1.5, ())
    assert model.needs_reload(model.model_copy(update={"max_queue_time": 2}))
