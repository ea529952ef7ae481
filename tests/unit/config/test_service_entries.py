"""How many calls a service takes is said alike for every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.config.ovms_json import examine_config, parse_config
from ovmstrio.runtimes.table import KINDS

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
ENTRIES: dict[str, dict[str, Any]] = {
    "model_config_list": {"name": "m", "base_path": "/m"},
    "mediapipe_config_list": {"name": "g"},
    "pipeline_config_list": _PIPELINE,
    "handler_config_list": {"name": "h", "path": "h"},
    "op_pipeline_config_list": {"name": "o", "path": "o"},
}


def _config(section: str, limits: dict[str, Any]) -> bytes:
    entry: Any = {**ENTRIES[section], **limits}
    if section == "model_config_list":
        entry = {"config": entry}
    return json.dumps({"model_config_list": [], section: [entry]}).encode()


@pytest.mark.parametrize("section", ENTRIES)
def test_every_kind_has_limits(section: str, tmp_path: Path) -> None:
    """They are read, have defaults, and are no reason to load anything again."""
    read = [
        parse_config(KINDS.values(), _config(section, limits), tmp_path / "config.json").services[-1]
        for limits in ({}, {"max_concurrency": 3}, {"max_concurrency": 3, "max_queue": 0})
    ]
    assert [(spec.max_concurrency, spec.max_queue) for spec in read] == [(0, 100), (3, 100), (3, 0)]
    assert not read[0].needs_reload(read[2])


@pytest.mark.parametrize("section", ENTRIES)
def test_limits_that_say_nothing_are_told(section: str, tmp_path: Path) -> None:
    """A queue without a limit is a warning with its line; a negative number makes the file unusable."""
    spec = parse_config(KINDS.values(), _config(section, {"max_queue": 5}), tmp_path / "config.json")
    (problem,) = [problem for problem in spec.problems if problem.path.endswith("max_queue")]
    assert (problem.severity, problem.line) == ("warning", 1)
    wrong = examine_config(KINDS.values(), _config(section, {"max_concurrency": -1}), tmp_path / "config.json")
    assert [(problem.expected, problem.found) for problem in wrong.fatal] == [("0 or more", "-1")]
