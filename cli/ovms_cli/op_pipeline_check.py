"""``ovms pipeline check`` of a pipeline of Ops: its configuration, its script, and both together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from ovms_cli.console import stdout
from ovms_cli.op_pipeline import examine, find_script, load_service
from ovms_cli.problems import count, count_problems, problem_facts, safe, show_problems

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.errors import Problem

__all__ = ["check_service"]


def check_service(config: Path, service: Path | None, *, load: bool, as_json: bool) -> NoReturn:
    """Tell every problem of a pipeline of Ops; exits with 1 if there is an error.

    Without a script only the configuration is looked at.
    """
    import json

    script = find_script(config, service)
    checked = _Checked(config, script)
    checked.run(load=load)
    problems = checked.ordered()
    errors = [problem for problem in problems if problem.severity == "error"]
    if as_json:
        facts = {"pipelines": checked.names, **problem_facts(problems), "without_effect": dict(checked.without_effect)}
        typer.echo(json.dumps(facts, indent=2))
    else:
        show_problems(problems)
        for key, reason in checked.without_effect.items():
            stdout().print(f"[dim]no effect  {safe(key)}: {safe(reason)}[/]", highlight=False, soft_wrap=True)
        stdout().print(_summary(problems, errors, checked), highlight=False, soft_wrap=True)
    raise typer.Exit(1 if errors else 0)


class _Checked:
    """What is found of one pipeline, step by step.

    Attributes:
        script: makes the Ops; None if only the configuration is looked at.
        names: the service's name, once the script has run.
        ops: the names of its Ops, likewise.
    """

    def __init__(self, config: Path, script: Path | None) -> None:
        self.script = script
        self.names: list[str] = []
        self.ops: list[str] = []
        self.without_effect: Mapping[str, str] = {}
        self._config = config
        self._problems: list[Problem] = []

    def run(self, *, load: bool) -> None:
        """Look at everything that can be looked at."""
        from ovmstrio.core.errors import ConfigError

        try:
            examined = examine(self._config, None)
            self._problems += examined.problems
            self.without_effect = examined.without_effect
        except ConfigError as error:
            self._problems += error.problems
        else:
            if self.script is not None:
                self._run_script(self.script, load=load)

    def _run_script(self, script: Path, *, load: bool) -> None:
        import trio

        from ovmstrio.core.errors import ConfigError
        from ovmstrio.runtimes.ops.examining import examine_pipeline

        try:
            service = load_service(self._config, script)
            self.names = [service.name]
            graph = service.graph()
            self.ops = list(graph.ops)
            examined = examine(self._config, service)
            self._problems += [problem for problem in examined.problems if problem not in self._problems]
            found = trio.run(lambda: examine_pipeline(graph, examined, load=load))
        except ConfigError as error:
            found = list(error.problems)
        self._problems += [problem if problem.file else replace(problem, file=str(script)) for problem in found]

    def ordered(self) -> list[Problem]:
        """Give the problems by file and line, those of the configuration first."""
        first = str(self._config)
        return sorted(self._problems, key=lambda problem: (problem.file != first, problem.file, problem.line or 0))


def _summary(problems: Sequence[Problem], errors: Sequence[Problem], checked: _Checked) -> str:
    if problems:
        mark = "[bold red]not ok[/]" if errors else "[bold green]ok[/]"
        return f"{mark}: {count_problems(problems)}"
    if checked.script is None:
        return "[bold green]ok[/]: no problem found in the configuration; --service names the script, to check its Ops"
    return f"[bold green]ok[/]: service {safe(checked.names[0])} with {count(len(checked.ops), 'Op')}, no problem found"
