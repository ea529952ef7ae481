"""``ovms graph``: check and show graph files, without loading models or running user code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.commands import App
from ovmstrio.cli.console import resolve_file
from ovmstrio.cli.diagram_output import (
    DrawingJsonOption,
    FileOption,
    PictureFormat,
    PictureOption,
    render,
    write_picture,
)
from ovmstrio.cli.problems import Strict, as_errors, conclude, count, point_to, show_problems
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen

if TYPE_CHECKING:
    from ovmstrio.graphs.validate import GraphValidation

_GraphPath = Annotated[Path, typer.Argument(metavar="PATH", help="File graph.pbtxt, or its directory.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = App(help="Check and show graph files.")
    group.command()(check)
    group.command()(show)
    app.add_typer(group, name="graph")


def check(
    path: _GraphPath,
    *,
    strict: Strict = False,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
) -> None:
    """Check a graph file: report all problems with line and hint. Exit code 1 on errors."""
    examined = _examine(path)
    nodes = 0 if examined.config is None else len(examined.config.nodes)
    problems = as_errors(examined.problems) if strict else examined.problems
    success_message = f"{count(nodes, 'node')}, no problem found"
    conclude(problems, success_message, output=chosen(form, as_json=as_json))


def show(
    path: _GraphPath,
    *,
    picture: PictureOption = PictureFormat.TEXT,
    as_json: DrawingJsonOption = False,
    output: FileOption = None,
) -> None:
    """Draw a graph: its nodes in layers, streams with their tags, input policies and back edges."""
    from ovmstrio.graphs.plan import draw_graph

    picture = PictureFormat.JSON if as_json else picture
    examined = _examine(path)
    if examined.config is None:
        show_problems(examined.problems)
        raise typer.Exit(1)
    write_picture(render(draw_graph(examined.config), picture, plain=output is not None), output)
    point_to(f"ovms graph check {path}", examined.problems)


def _examine(path: Path) -> GraphValidation:
    from ovmstrio.graphs.validate import examine_graph

    return examine_graph(resolve_file(path, "graph.pbtxt"))
