"""Handlers in ``config.json``: their form, their names and their paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.ovms_json import examine_config, parse_config
from ovmstrio.config.specs import HandlerSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.table import KINDS

_FILE = Path("/etc/ovms/config.json")


def _parse(*handlers: Any, **lists: Any) -> ServerSpec:
    content = {"model_config_list": [], **lists, "handler_config_list": list(handlers)}
    return parse_config(KINDS.values(), json.dumps(content, indent=1).encode(), _FILE)


def _problems_of(spec: ServerSpec) -> tuple[Problem, ...]:
    (handler,) = spec.of(HandlerSpec)
    return handler.problems


def test_a_handler_is_a_folder_or_a_file() -> None:
    """Relative paths lead on from the configuration's folder."""
    spec = _parse({"name": "iris", "path": "iris"}, {"name": "other", "path": "/srv/other/mine.yaml"})
    assert tuple(each.model_copy(update={"place": None}) for each in spec.of(HandlerSpec)) == (
        HandlerSpec(name="iris", base_path=Path("/etc/ovms/iris"), path=Path("/etc/ovms/iris"), origin=f"{_FILE}:4"),
        HandlerSpec(name="other", base_path=Path("/srv/other"), path=Path("/srv/other/mine.yaml"), origin=f"{_FILE}:8"),
    )
    assert len(spec.services) == 2
    assert spec.problems == ()


@pytest.mark.parametrize(
    ("entry", "path", "message"),
    [
        ({"name": "", "path": "a"}, "handler_config_list[0].name", "the name is empty"),
        ({"name": "a/b", "path": "a"}, "handler_config_list[0].name", "the name cannot be used"),
        ({"name": "v2", "path": "a"}, "handler_config_list[0].name", "the name is the beginning of the server's own"),
        ({"name": "v3", "path": "a"}, "handler_config_list[0].name", "the name is the beginning of the server's own"),
        ({"name": "health", "path": "a"}, "handler_config_list[0].name", "the name is the beginning of the server's"),
        ({"name": "a", "path": ""}, "handler_config_list[0].path", "the path is empty"),
        ({"name": "a", "path": "s3://b/a"}, "handler_config_list[0].path", "remote storage is not served"),
        ({"name": "a", "path": "a\0"}, "handler_config_list[0].path", "the path cannot be used"),
    ],
)
def test_problems_stay_with_the_handler(entry: dict[str, str], path: str, message: str) -> None:
    """It is known by name, and everything else is served."""
    (problem,) = _problems_of(_parse(entry))
    assert problem.path == path
    assert problem.message.startswith(message)
    assert problem.line is not None


@pytest.mark.parametrize(
    ("entry", "path", "message"),
    [
        ({"name": "a"}, "handler_config_list[0]", "the key 'path' is missing"),
        ({"name": "a", "path": 3}, "handler_config_list[0].path", "wrong type or value"),
        ({"name": "a", "path": "a", "port": 1}, "handler_config_list[0].port", "unknown key 'port'"),
        ("a", "handler_config_list[0]", "wrong type or value"),
    ],
)
def test_what_breaks_the_form_breaks_the_file(entry: Any, path: str, message: str) -> None:
    """As in every other section."""
    with pytest.raises(ConfigError) as caught:
        _parse(entry)
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == (path, message)


def test_of_two_with_one_name_the_first_counts() -> None:
    """The other is a warning."""
    spec = _parse({"name": "a", "path": "first"}, {"name": "a", "path": "second"})
    assert [handler.path.name for handler in spec.of(HandlerSpec)] == ["first"]
    assert [(each.severity, each.path) for each in spec.problems] == [("warning", "handler_config_list[1].name")]


def test_the_name_of_a_model_is_taken() -> None:
    """The model is served, the handler is not."""
    models = [{"config": {"name": "a", "base_path": "/models/a"}}]
    content = {"model_config_list": models, "handler_config_list": [{"name": "a", "path": "b"}]}
    examined = examine_config(KINDS.values(), json.dumps(content).encode(), _FILE)
    assert examined.spec.of(HandlerSpec) == ()
    (problem,) = examined.spec.problems
    assert problem.message == "Handler has a name that is taken: 'a' is a model's, which is served"
    assert problem.path == "handler_config_list[0].name"
    places = [service.place for service in examined.spec.services]
    assert [place.settings.path for place in places if place] == ["model_config_list[0].config"]


def test_a_broken_file_tells_the_problems_of_its_handlers() -> None:
    """Everything at once."""
    with pytest.raises(ConfigError) as caught:
        _parse({"name": "a", "path": ""}, monitoring={"metrics": {"enable": 1}})
    assert {problem.path for problem in caught.value.problems} == {
        "monitoring.metrics.enable",
        "handler_config_list[0].path",
    }


def test_a_handler_may_ask_for_processes() -> None:
    """With the keys that graphs have for this, checked in the same way."""
    asked = {"name": "a", "path": "a", "python_processes": 2, "python_timeout_seconds": 1.5}
    (spec,) = _parse(asked).of(HandlerSpec)
    assert (spec.python.isolation, spec.python.processes, spec.python.timeout_seconds) == ("process", 2, 1.5)
    assert _parse({"name": "a", "path": "a"}).of(HandlerSpec)[0].python.isolation is None
    (problem,) = _problems_of(_parse({"name": "a", "path": "a", "python": "none/bin/python"}))
    assert problem.path == "handler_config_list[0].python"
    assert problem.message == "there is no such interpreter"
