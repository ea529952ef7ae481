"""Process in which ``ovms custom-node check`` runs a library; it records each step before the step begins."""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
import trio

from ovmstrio.config.pipeline_entries import find_library
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.pipelines.custom_node import ItemInfo
from ovmstrio.pipelines.open_node import open_custom_node

__all__: list[str] = []


@dataclass
class _Report:
    """Report of the check so far, kept in a file because the process may crash at any time."""

    library: str
    path: Path
    problems: list[Problem] = field(default_factory=list)
    inputs: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    outputs: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)

    def write(self, step: str) -> None:
        """Write the report, with the step that begins now."""
        facts = {
            "step": step,
            "problems": [asdict(problem) for problem in self.problems],
            "inputs": self.inputs,
            "outputs": self.outputs,
        }
        self.path.write_text(json.dumps(facts), encoding="utf-8")

    def take_log(self, _logger: Any, method: str, event: Mapping[str, Any]) -> Any:
        """Convert a log record to a problem, and drop the record. Runs as structlog's only processor."""
        facts = {name: value for name, value in event.items() if name not in ("event", "exc_info")}
        error = event.get("exc_info")
        details = [f"{name}: {value}" for name, value in facts.items()]
        details += [f"{type(error[1]).__name__}: {error[1]}"] if isinstance(error, tuple) else []
        severity = "warning" if method == "warning" else "error"
        self.problems.append(Problem(f"{event['event']} ({', '.join(details)})", self.library, severity=severity))
        raise structlog.DropEvent


async def _probe(report: _Report, library: Path, params: Mapping[str, str]) -> None:
    report.write("open")
    async with trio.open_nursery() as tasks:
        await _open_and_close(report, library, params, tasks)


async def _open_and_close(report: _Report, library: Path, params: Mapping[str, str], tasks: trio.Nursery) -> None:
    try:
        node = await open_custom_node(library, "node", params, tasks=tasks)
    except ConfigError as error:
        # The logged errors repeat the problems of this exception.
        report.problems = [problem for problem in report.problems if problem.severity == "warning"]
        report.problems += [replace(each, file=each.file or report.library) for each in error.problems]
        return
    report.inputs, report.outputs = _items(node.inputs.values()), _items(node.outputs.values())
    report.write("close")
    await node.aclose()


def _items(infos: Iterable[ItemInfo]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(info.name, "" if info.datatype is None else info.datatype.name, info.shape) for info in infos]


def _main() -> None:
    faulthandler.enable()
    question = json.load(sys.stdin)
    report = _Report(question["library"], Path(question["report"]))
    structlog.configure(
        processors=[report.take_log], wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING)
    )
    library = find_library(question["library"], Path.cwd())
    trio.run(_probe, report, library, question["params"])
    report.write("done")


if __name__ == "__main__":
    _main()
