"""Pipelines of Ops in ``config.json``: their form, their names and their paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.ovms_json import parse_config
from ovmstrio.config.specs import OpPipelineSpec, ServerSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.table import KINDS

_FILE = Path("/etc/ovms/config.json")


def _parse(*pipelines: Any, **lists: Any) -> ServerSpec:
    content = {"model_config_list": [], **lists, "op_pipeline_config_list": list(pipelines)}
    return parse_config(KINDS.values(), json.dumps(content, indent=1).encode(), _FILE)


@pytest.mark.parametrize(
    ("entry", "config", "script"),
    [
        ({"path": "uci"}, "uci/config.yml", "uci/web_service.py"),
        ({"path": "uci/other.yaml"}, "uci/other.yaml", "uci/web_service.py"),
        ({"path": "uci", "service": "scripts/s.py"}, "uci/config.yml", "scripts/s.py"),
        ({"path": "/srv/uci", "service": "/srv/s.py"}, "/srv/uci/config.yml", "/srv/s.py"),
    ],
)
def test_a_pipeline_is_a_configuration_with_a_script(entry: dict[str, str], config: str, script: str) -> None:
    """Relative paths lead on from the configuration's folder; the script has a name of its own beside the Ops'."""
    (spec,) = _parse({"name": "uci", **entry}).of(OpPipelineSpec)
    assert (spec.name, spec.problems, spec.origin) == ("uci", (), f"{_FILE}:4")
    assert (spec.config, spec.script) == (_FILE.parent / config, _FILE.parent / script)
    assert spec.base_path == (_FILE.parent / config).parent


@pytest.mark.parametrize(
    ("entry", "path", "message"),
    [
        ({"name": "metrics", "path": "a"}, "name", "the name is the beginning of the server's own paths"),
        ({"name": "a/b", "path": "a"}, "name", "the name cannot be used"),
        ({"name": "a", "path": ""}, "path", "the path is empty"),
        ({"name": "a", "path": "s3://b"}, "path", "remote storage is not served"),
        ({"name": "a", "path": "a", "service": ""}, "service", "the service is empty"),
        ({"name": "a", "path": "a", "service": "a\0"}, "service", "the path cannot be used"),
    ],
)
def test_problems_stay_with_the_pipeline(entry: dict[str, str], path: str, message: str) -> None:
    """It is known by name, and everything else is served."""
    (spec,) = _parse(entry).of(OpPipelineSpec)
    (problem,) = spec.problems
    assert problem.path == f"op_pipeline_config_list[0].{path}"
    assert problem.message.startswith(message)
    assert problem.line is not None


def test_what_breaks_the_form_breaks_the_file() -> None:
    """As in every other section."""
    with pytest.raises(ConfigError) as caught:
        _parse({"name": "a", "script": "b"})
    assert [(problem.path, problem.message) for problem in caught.value.problems] == [
        ("op_pipeline_config_list[0]", "the key 'path' is missing"),
        ("op_pipeline_config_list[0].script", "unknown key 'script'"),
    ]


def test_a_name_belongs_to_one() -> None:
    """The first counts, and the others are told with their places."""
    handlers = [{"name": "h", "path": "h"}]
    spec = _parse({"name": "h", "path": "a"}, {"name": "b", "path": "a"}, {"name": "b", "path": "c"},
                  handler_config_list=handlers)  # fmt: skip
    assert [service.name for service in spec.services] == ["h", "b"]
    assert [(problem.path, problem.message, problem.severity) for problem in spec.problems] == [
        ("op_pipeline_config_list[0].name", "Op pipeline has a name that is taken: 'h' is a handler's, which is served",
         "error"),
        ("op_pipeline_config_list[2].name", "there is an op pipeline 'b' already, so this one is left out", "warning"),
    ]  # fmt: skip
