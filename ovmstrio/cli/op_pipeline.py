"""``ovms pipeline check`` and ``show`` for pipelines of Ops (Paddle Serving)."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import typer

from ovmstrio.cli.console import EX_USAGE, fail
from ovmstrio.cli.diagram_output import PictureFormat, render, write_picture
from ovmstrio.cli.problems import as_errors, conclude, count, problem_facts, safe
from ovmstrio.cli.script import call_script

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.cli.tables import Output
    from ovmstrio.core.errors import Problem
    from ovmstrio.ops.config_file import ValidatedConfig
    from ovmstrio.ops.graph import WebService
    from ovmstrio.util.drawing import Drawing

_DEFAULT_SCRIPT: Final = "web_service.py"


def find_op_config(config: Path, service: Path | None) -> Path | None:
    """Return the configuration of a pipeline of Ops: a YAML file, or one in a directory without ``config.json``."""
    from ovmstrio.server.target import find_ops_config

    if not config.is_dir():
        return config if service is not None else find_ops_config(config)
    has_other = service is None and (config / "config.json").is_file()
    return None if has_other else find_ops_config(config)


def _find_script(config: Path, service: Path | None) -> Path | None:
    """Return the script that creates the Ops; by default the only one next to the configuration, or None."""
    from ovmstrio.server.target import find_scripts

    if service is None:
        scripts = find_scripts(config)
        return scripts[0] if len(scripts) == 1 else None
    if not service.is_file():
        fail(f"{service}: no such file; --service names the script that creates the Ops", EX_USAGE)
    return service


def _load_service(config: Path, script: Path) -> WebService:
    """Run a script up to the start of its server, and return its service.

    Output of the script goes to standard error.

    Raises:
        ConfigError: the Ops are no valid pipeline, or the script raised.
    """
    from ovmstrio.core.errors import ConfigError

    found: list[WebService] = []
    try:
        with contextlib.redirect_stdout(sys.stderr):
            call_script(script, [], str(config), found.append)
    except (ConfigError, typer.Exit):
        raise
    except Exception as error:
        raise ConfigError([_raised(error, script)]) from error
    return found[0]


def _raised(error: Exception, script: Path) -> Problem:
    import traceback

    from ovmstrio.core.errors import Problem

    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == script.resolve()]
    return Problem(f"the script raised {type(error).__name__}: {error}", str(script), lines[-1] if lines else None)


def _examine(config: Path, service: WebService | None) -> ValidatedConfig:
    """Validate the configuration of a service: the file, or the dictionary that its script passes.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    from ovmstrio.ops.config_file import validate_pipeline_config

    if service is not None and service.yml_dict is not None:
        return validate_pipeline_config(yml_dict=service.yml_dict)
    return validate_pipeline_config(config)


def show_service(config: Path, service: Path | None, picture: PictureFormat, output: Path | None) -> None:
    """Draw the Ops of a script with their settings. Exit code 1 if the Ops are no valid pipeline."""
    from ovmstrio.core.errors import ConfigError

    script = _find_script(config, service)
    if script is None:
        fail(
            f"there is no {_DEFAULT_SCRIPT} next to {config}; --service names the script that creates the Ops", EX_USAGE
        )
    try:
        drawing = _draw(config, script)
    except ConfigError as error:
        fail(f"{error}\nsee: ovms pipeline check {config} --service {script}")
    write_picture(render(drawing, picture, plain=output is not None), output)


def _draw(config: Path, script: Path) -> Drawing:
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.ops.graph import draw

    service = _load_service(config, script)
    examined = _examine(config, service)
    if examined.errors:
        raise ConfigError(examined.errors)
    return draw(service.graph(), examined.settings)


def check_service(config: Path, service: Path | None, *, load: bool, strict: bool, output: Output) -> NoReturn:
    """Report all problems of a pipeline of Ops. Exit code 1 on errors.

    Without a script, only the configuration is checked.
    """
    found = _examine_service(config, _find_script(config, service), load=load)
    problems = as_errors(found.problems) if strict else found.problems
    facts = {"pipelines": found.names, **problem_facts(problems), "without_effect": dict(found.without_effect)}
    notes = [f"[dim]no effect  {safe(key)}: {safe(reason)}[/]" for key, reason in found.without_effect.items()]
    conclude(problems, found.success_message, facts, notes, output)


def find_service_problems(config: Path, *, imports: bool) -> tuple[list[str], list[Problem]]:
    """Return the names of a configuration's services, and all problems; loads the models.

    Without ``imports``, or if there is no script next to the configuration, only the configuration is checked.
    """
    from ovmstrio.core.errors import Problem
    from ovmstrio.server.target import find_scripts

    script = _find_script(config, None) if imports else None
    found = _examine_service(config, script, load=True)
    if imports and script is None:
        several = ", ".join(each.name for each in find_scripts(config))
        lack = f"several scripts create Ops: {several}" if several else f"there is no {_DEFAULT_SCRIPT}"
        message = f"{lack}, only the configuration is checked"
        hint = f"use: ovms pipeline check {config} --service SCRIPT"
        found.problems.append(Problem(message, str(config), suggestion=hint, severity="warning"))
    return found.names, found.problems


def _examine_service(config: Path, script: Path | None, *, load: bool) -> _Findings:
    from ovmstrio.core.errors import ConfigError

    found = _Findings()
    try:
        found.collect(config, script, load=load)
    except ConfigError as error:
        found.problems += error.problems
    first = str(config)
    placed = [each if each.file else replace(each, file=str(script or config)) for each in found.problems]
    found.problems = sorted(placed, key=lambda problem: (problem.file != first, problem.file, problem.line or 0))
    return found


@dataclass(slots=True)
class _Findings:
    """Findings about one pipeline so far, and the message if there are no problems."""

    names: list[str] = field(default_factory=list)
    success_message: str = "no problem found in the configuration; --service names the script to check its Ops"
    without_effect: Mapping[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def collect(self, config: Path, script: Path | None, *, load: bool) -> None:
        from ovmstrio.ops.validate import validate_pipeline
        from ovmstrio.util.interrupts import run_interruptible

        examined = _examine(config, None)
        self.problems += examined.problems
        self.without_effect = examined.without_effect
        if script is None:
            return
        service = _load_service(config, script)
        self.names = [service.name]
        graph = service.graph()
        self.success_message = f"service {safe(service.name)} with {count(len(graph.ops), 'Op')}, no problem found"
        with_script = _examine(config, service)
        self.problems += [problem for problem in with_script.problems if problem not in self.problems]
        self.problems += run_interruptible(lambda: validate_pipeline(graph, with_script, load=load))
