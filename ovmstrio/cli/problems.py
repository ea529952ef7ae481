"""Report of the problems of configuration and graph files: grouped by file, each with line and hint."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from ovmstrio.cli.console import print_json, print_result, stderr, stdout
from ovmstrio.cli.tables import Output, print_csv
from ovmstrio.util.truncation import escape_controls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ovmstrio.core.errors import Problem

_COLUMNS: Final = ("severity", "file", "line", "path", "message", "expected", "found", "suggestion")

Strict = Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")]


def as_errors(problems: Iterable[Problem]) -> list[Problem]:
    """Turn warnings into errors."""
    return [replace(problem, severity="error") for problem in problems]


def show_problems(problems: Sequence[Problem]) -> None:
    """Print problems, which must be ordered by file."""
    for file, found in groupby(problems, key=lambda problem: problem.file):
        print_result(f"[bold]{safe(file)}[/]")
        for problem in found:
            _show_problem(problem)
        stdout().print()


def _show_problem(problem: Problem) -> None:
    colour = "red" if problem.severity == "error" else "yellow"
    places = [f"[bold]{safe(Path(problem.file).name)}:{problem.line}[/]"] if problem.line is not None else []
    if problem.path:
        places.append(f"[cyan]{safe(problem.path)}[/]")
    lines = ["  ".join([f"  [{colour}]{problem.severity}[/]", *places])]
    facts = {"expected": problem.expected, "found": problem.found, "hint": problem.suggestion}
    if places:
        lines.append(f"    {safe(problem.message)}")
    else:
        lines[0] += f"  {safe(problem.message)}"
    lines += [f"    [dim]{label:8}[/]  {safe(text)}" for label, text in facts.items() if text]
    print_result("\n".join(lines))


def conclude(
    problems: Sequence[Problem],
    success_message: str,
    facts: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
    output: Output = Output.TABLE,
) -> NoReturn:
    """Print the problems and their number, or the facts, and end the command: with 1 if one is an error.

    Args:
        problems: ordered by file.
        success_message: text that is printed if there are none; markup.
        facts: the JSON output; by default the problems and their number.
        notes: lines between the problems and their number; markup.
        output: the form; CSV contains the problems.
    """
    errors = _errors(problems)
    if output is Output.JSON:
        print_json(problem_facts(problems) if facts is None else facts)
    elif output is Output.CSV:
        print_csv(problem_rows(problems))
    else:
        show_problems(problems)
        mark = "[bold red]not ok[/]" if errors else "[bold green]ok[/]"
        for each in notes:
            print_result(each)
        print_result(f"{mark}: {count_problems(problems) if problems else success_message}")
    raise typer.Exit(1 if errors else 0)


def point_to(command: str, problems: Sequence[Problem]) -> None:
    """Print the command that shows the problems, if one of them is an error."""
    if _errors(problems):
        text = f"{count_problems(problems)}; {safe(f'see: {command}')}"
        stderr().print(text, highlight=False, soft_wrap=True)


def count_problems(problems: Sequence[Problem]) -> str:
    """Return the numbers of errors, warnings and files as a text."""
    errors = _errors(problems)
    files = count(len({problem.file for problem in problems}), "file")
    return f"{count(errors, 'error')} and {count(len(problems) - errors, 'warning')} in {files}"


def problem_facts(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the JSON form of problems."""
    errors = _errors(problems)
    return {
        "ok": not errors,
        "errors": errors,
        "warnings": len(problems) - errors,
        "problems": [asdict(problem) for problem in problems],
    }


def problem_rows(problems: Sequence[Problem]) -> list[list[Any]]:
    """Return the names of the columns, then a row for each problem."""
    facts = [[getattr(each, name) for name in _COLUMNS] for each in problems]
    return [list(_COLUMNS), *([" ".join(str(value).split("\n")) for value in row] for row in facts)]


def _errors(problems: Sequence[Problem]) -> int:
    return sum(problem.severity == "error" for problem in problems)


def count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def safe(text: str) -> str:
    """Escape rich's markup and control characters in a text that comes from a client, a file or a server."""
    from rich.markup import escape

    return escape(escape_controls(text, keep="\n"))
