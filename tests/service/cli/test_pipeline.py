from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import ir
from tests.support.commands import run_command
from tests.support.pipelines import write_library

run = partial(run_command, "pipeline")


@pytest.fixture(autouse=True)
def _model_and_library(command_folder: Path) -> None:
    ir.save(ir.dummy((1, 2)), command_folder, "m")
    write_library(command_folder)


def _source(name: str, node: str, item: str) -> dict[str, Any]:
    return {name: {"node_name": node, "data_item": item}}


def _pipeline(name: str = "p", **changes: Any) -> dict[str, Any]:
    model = {
        "name": "adds",
        "type": "DL model",
        "model_name": "m",
        "inputs": [_source("b", "sums", "sum")],
        "outputs": [{"data_item": "a", "alias": "a"}],
    }
    custom = {
        "name": "sums",
        "type": "custom",
        "library_name": "arithmetic",
        "params": {"op": "add", "inputs": "i"},
        "inputs": [_source("i", "request", "x")],
        "outputs": [{"data_item": "y", "alias": "sum"}],
    }
    model.update(changes.pop("model", {}))
    custom.update(changes.pop("custom", {}))
    return {"name": name, "inputs": ["x"], "nodes": [custom, model], "outputs": [_source("o", "adds", "a")], **changes}


def write(*pipelines: dict[str, Any], **sections: Any) -> None:
    """Write the configuration, with one good pipeline unless others are given."""
    content = {
        "model_config_list": [{"config": {"name": "m", "base_path": "m"}}],
        "custom_node_library_config_list": [{"name": "arithmetic", "base_path": "arithmetic.py"}],
        "pipeline_config_list": list(pipelines or [_pipeline()]),
        **sections,
    }
    Path("config.json").write_text(json.dumps(content, indent=1))


def _line(text: str) -> int:
    lines = Path("config.json").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_good_pipeline_is_ok() -> None:
    """The file or its folder may be named, with models or without."""
    write()
    for arguments in ((".",), ("config.json", "p"), ("config.json", "--no-models")):
        result = run("check", *arguments)
        assert (result.exit_code, result.stdout) == (0, "ok: 1 pipeline, no problem found\n")


def test_every_problem_has_file_line_and_hint() -> None:
    """What the structure says and what the models say is told at once, and the exit code is 1."""
    write(_pipeline(model={"inputs": [_source("c", "sums", "sum")]}, outputs=[_source("o", "ads", "a")]))
    result = run("check", ".")
    assert result.exit_code == 1
    place = f"config.json:{_line('adds') - 1}"
    found = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert found.count(f"error {place}") == 3
    for text in (
        "PIPELINE_NODE_REFERING_TO_MISSING_NODE: node 'response': the output 'o' comes from 'ads', which is no node",
        "hint did you mean 'adds'?",
        "PIPELINE_CONTAINS_UNCONNECTED_NODES: node 'sums': nothing that it gives is used",
        "PIPELINE_CONNECTION_TO_MISSING_MODEL_INPUT: node 'adds': it has no input 'c'",
    ):
        assert text in found
    assert found[-1] == "not ok: 5 errors and 0 warnings in 1 file"


def test_without_models_nothing_is_loaded() -> None:
    """Names of models are compared with the file; what only models can tell is not found."""
    Path("m/1/model.xml").write_text("broken")
    Path("arithmetic.py").write_text("raise RuntimeError")
    write(_pipeline(), _pipeline("q", model={"model_name": "n"}))
    assert run("check", ".", "p", "--no-models").exit_code == 0
    result = run("check", ".", "q", "--no-models", "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["ok"], facts["pipelines"]) == (1, False, ["q"])
    (problem,) = facts["problems"]
    assert problem["message"].endswith("no model 'n' is configured")
    assert (problem["line"], problem["suggestion"]) == (_line('"n"') - 3, "known are m, p")
    assert "RuntimeError" in run("check", ".", "p").stdout


def test_only_what_the_named_pipeline_calls_is_looked_at() -> None:
    """Another pipeline, or a model that it does not call, may be wrong."""
    models = [{"config": {"name": name, "base_path": name}} for name in ("m", "nowhere")]
    write(_pipeline(), _pipeline("q", outputs=[_source("o", "nobody", "a")]), model_config_list=models)
    assert run("check", ".", "p").exit_code == 0
    assert run("check", ".").exit_code == 1


@pytest.mark.parametrize("command", ["check", "show"])
def test_what_is_not_there_is_a_wrong_command_line(command: str) -> None:
    """A file or a name; the names that are known are told."""
    assert run(command, "nowhere").exit_code == 64
    write()
    result = run(command, ".", "q")
    assert result.exit_code == 64
    assert "there is no pipeline 'q'; known are p" in result.stderr


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_file_without_pipelines_or_that_cannot_be_read(command: str) -> None:
    """The reason is told, and the exit code is 1."""
    write(pipeline_config_list=[])
    result = run(command, ".")
    assert (result.exit_code, "no pipeline" in result.stderr) == (1, True)
    Path("config.json").write_text("{")
    result = run(command, ".")
    assert (result.exit_code, "config.json" in result.stdout) == (1, True)


def test_the_terminal_shows_what_is_called_and_split() -> None:
    """Nodes with models and libraries, levels, and connections by both names."""
    write(_pipeline(demultiply_count=-1))
    result = run("show", ".")
    assert result.exit_code == 0
    for text in (
        "splits into shards",
        "library arithmetic (arithmetic.py)",
        "model m",
        "once for each shard of the request",
        "← b:sum from sums",
        "→ y:sum to adds",
        "gathers the request",
    ):
        assert text in result.stdout
    titles = [line[3:].split()[0] for line in result.stdout.splitlines() if line.startswith("╭─ ")]
    assert titles == ["x", "sums", "adds", "o"]


def test_several_pipelines_are_shown_below_each_other() -> None:
    """In the terminal; a picture of another format is of one."""
    write(_pipeline(), _pipeline("q"))
    result = run("show", ".")
    assert [line for line in result.stdout.splitlines() if line in ("p", "q")] == ["p", "q"]
    result = run("show", ".", "--format", "svg")
    assert (result.exit_code, "name one of the pipelines: p, q" in result.stderr) == (64, True)
    assert run("show", ".", "q", "--format", "svg").exit_code == 0


def test_a_pipeline_with_errors_is_still_shown() -> None:
    """How to see them is told beside the picture."""
    write(_pipeline(model={"model_name": "n"}))
    result = run("show", ".", "--format", "mermaid")
    assert result.exit_code == 0
    assert 'n1["adds<br/>model n"]' in result.stdout
    assert "ovms pipeline check ." in result.stderr
