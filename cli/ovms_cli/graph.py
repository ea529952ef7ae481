"""``ovms graph``: check and show graph files, without loading models or running user code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovms_cli.console import EX_USAGE, fail, stderr, stdout
from ovms_cli.pictures import FormatOption, OutputOption, PictureFormat, render, write_picture
from ovms_cli.problems import count, count_problems, problem_facts, safe, show_problems

if TYPE_CHECKING:
    from ovmstrio.runtimes.graphs.examining import Examination

__all__ = ["register"]

_DEFAULT_NAME = "graph.pbtxt"

_GraphPath = Annotated[
    Path, typer.Argument(help="graph.pbtxt, or the directory that it is in", show_default=False, metavar="PATH")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Check and show graph files.")
    group.command()(check)
    group.command()(show)
    app.add_typer(group, name="graph")


def check(path: _GraphPath, *, as_json: Annotated[bool, typer.Option("--json", help="answer in JSON")] = False) -> None:
    """Tell every problem of a graph file with its line and the way out: exits with 1 if there is an error."""
    import json

    examined = _examine(path)
    if as_json:
        typer.echo(json.dumps(problem_facts(examined.problems), indent=2))
    else:
        show_problems(examined.problems)
        stdout().print(_summary(examined), highlight=False)
    raise typer.Exit(1 if examined.errors else 0)


def show(path: _GraphPath, *, picture: FormatOption = PictureFormat.TEXT, output: OutputOption = None) -> None:
    """Draw a graph: its nodes in layers, streams with their tags, input policies and back edges."""
    from ovmstrio.runtimes.graphs.graph_drawing import draw

    examined = _examine(path)
    if examined.config is None:
        show_problems(examined.problems)
        raise typer.Exit(1)
    write_picture(render(draw(examined.config), picture, plain=output is not None), output)
    if examined.errors:
        hint = f"see: ovms graph check {path}"
        stderr().print(f"{count_problems(examined.problems)}; {safe(hint)}", highlight=False, soft_wrap=True)


def _examine(path: Path) -> Examination:
    from ovmstrio.runtimes.graphs.examining import examine_graph

    file = path / _DEFAULT_NAME if path.is_dir() else path
    if not file.is_file():
        fail(f"{file}: no such file; give a graph.pbtxt, or the directory that it is in", EX_USAGE)
    return examine_graph(file)


def _summary(examined: Examination) -> str:
    if examined.problems:
        mark = "[bold red]not ok[/]" if examined.errors else "[bold green]ok[/]"
        return f"{mark}: {count_problems(examined.problems)}"
    nodes = 0 if examined.config is None else len(examined.config.nodes)
    return f"[bold green]ok[/]: {count(nodes, 'node')}, no problem found"
