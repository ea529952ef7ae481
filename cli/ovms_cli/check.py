"""``ovms check``: read and load everything that a configuration names, serve nothing, tell every problem."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovms_cli.console import fail, stderr, stdout

if TYPE_CHECKING:
    from ovmstrio.checking import CheckReport
    from ovmstrio.errors import Problem

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(check)


def check(
    config: Annotated[Path, typer.Argument(help="config.json, or the directory of one model", show_default=False)],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="answer in JSON")] = False,
) -> None:
    """Load everything without serving, and tell every problem of every file: exits with 1 if there is an error."""
    import trio

    from ovmstrio.checking import check_config
    from ovmstrio.observability.logs import configure_logs

    if not config.exists():
        fail(f"{config}: no such file or directory; give a config.json, or the directory of a model")
    configure_logs(level="ERROR")
    with stderr().status(f"checking {config} ..."):
        report = trio.run(check_config, config)
    if as_json:
        _print_json(report)
    else:
        _show(report)
    raise typer.Exit(1 if report.errors else 0)


def _print_json(report: CheckReport) -> None:
    import json
    from dataclasses import asdict

    facts: dict[str, Any] = {
        "ok": not report.errors,
        "errors": len(report.errors),
        "warnings": len(report.warnings),
        **asdict(report),
    }
    typer.echo(json.dumps(facts, indent=2))


def _show(report: CheckReport) -> None:
    for file, problems in groupby(report.problems, key=lambda problem: problem.file):
        stdout().print(f"[bold]{_safe(file)}[/]", highlight=False, soft_wrap=True)
        for problem in problems:
            _show_problem(problem)
        stdout().print()
    for loaded in report.loaded:
        stdout().print(f"[green]loads[/]  {_safe(loaded.model)} version {loaded.version}", highlight=False)
    stdout().print(_summary(report), highlight=False)


def _show_problem(problem: Problem) -> None:
    colour = "red" if problem.severity == "error" else "yellow"
    places = [f"[bold]{_safe(Path(problem.file).name)}:{problem.line}[/]"] if problem.line is not None else []
    if problem.path:
        places.append(f"[cyan]{_safe(problem.path)}[/]")
    lines = ["  ".join([f"  [{colour}]{problem.severity}[/]", *places])]
    facts = {"expected": problem.expected, "found": problem.found, "hint": problem.suggestion}
    if places:
        lines.append(f"    {_safe(problem.message)}")
    else:
        lines[0] += f"  {_safe(problem.message)}"
    lines += [f"    [dim]{label:8}[/]  {_safe(text)}" for label, text in facts.items() if text]
    stdout().print("\n".join(lines), highlight=False, soft_wrap=True)


def _summary(report: CheckReport) -> str:
    versions = _count(len(report.loaded), "version")
    if not report.problems:
        return f"[bold green]ok[/]: {versions} loaded, no problem found"
    files = _count(len({problem.file for problem in report.problems}), "file")
    found = f"{_count(len(report.errors), 'error')} and {_count(len(report.warnings), 'warning')} in {files}"
    mark = "[bold red]not ok[/]" if report.errors else "[bold green]ok[/]"
    return f"{mark}: {found}; {versions} loaded"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _safe(text: str) -> str:
    from rich.markup import escape

    return escape(text)
