"""``ovms pipeline check`` of a pipeline of Ops: its configuration, its script, and both together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ovms_cli.op_pipeline import examine, find_script, load_service
from ovms_cli.problems import conclude, count, problem_facts, safe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.errors import Problem

__all__ = ["check_service"]


def check_service(config: Path, service: Path | None, *, load: bool, as_json: bool) -> NoReturn:
    """Tell every problem of a pipeline of Ops; exits with 1 if there is an error.

    Without a script only the configuration is looked at.
    """
    checked = _CheckedService(config)
    checked.run(find_script(config, service), load=load)
    problems = checked.ordered()
    facts = {"pipelines": checked.names, **problem_facts(problems), "without_effect": dict(checked.without_effect)}
    remarks = [f"[dim]no effect  {safe(key)}: {safe(reason)}[/]" for key, reason in checked.without_effect.items()]
    conclude(problems, checked.sound, facts if as_json else None, remarks)


class _CheckedService:
    """What is found of one pipeline, step by step.

    Attributes:
        names: the service's name, once its script has run.
        sound: what is said if nothing is wrong; markup.
        without_effect: keys that mean nothing here, and why.
    """

    def __init__(self, config: Path) -> None:
        self.names: list[str] = []
        self.sound = "no problem found in the configuration; --service names the script, to check its Ops"
        self.without_effect: Mapping[str, str] = {}
        self._config = config
        self._problems: list[Problem] = []

    def run(self, script: Path | None, *, load: bool) -> None:
        """Look at everything that can be looked at; without a script, at the configuration alone."""
        from ovmstrio.core.errors import ConfigError

        try:
            examined = examine(self._config, None)
            self._problems += examined.problems
            self.without_effect = examined.without_effect
        except ConfigError as error:
            self._problems += error.problems
        else:
            if script is not None:
                self._run_script(script, load=load)

    def _run_script(self, script: Path, *, load: bool) -> None:
        import trio

        from ovmstrio.core.errors import ConfigError
        from ovmstrio.runtimes.ops.examining import examine_pipeline

        try:
            service = load_service(self._config, script)
            self.names = [service.name]
            graph = service.graph()
            self.sound = f"service {safe(service.name)} with {count(len(graph.ops), 'Op')}, no problem found"
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
