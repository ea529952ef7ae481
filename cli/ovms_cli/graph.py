"""``ovms graph``: check and show graph files, without loading models or running user code."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovms_cli.console import EX_USAGE, fail, stderr, stdout
from ovms_cli.problems import count, count_problems, safe, show_problems

if TYPE_CHECKING:
    from ovmstrio.graphs.examining import Examination

__all__ = ["register"]

_DEFAULT_NAME = "graph.pbtxt"

_GraphPath = Annotated[
    Path, typer.Argument(help="graph.pbtxt, or the directory that it is in", show_default=False, metavar="PATH")
]


class PictureFormat(StrEnum):
    """How a graph is shown."""

    TEXT = "text"
    MERMAID = "mermaid"
    SVG = "svg"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Check and show graph files.")
    group.command()(check)
    group.command()(show)
    app.add_typer(group, name="graph")


def check(path: _GraphPath, *, as_json: Annotated[bool, typer.Option("--json", help="answer in JSON")] = False) -> None:
    """Tell every problem of a graph file with its line and the way out: exits with 1 if there is an error."""
    examined = _examine(path)
    if as_json:
        _print_json(examined)
    else:
        show_problems(examined.problems)
        stdout().print(_summary(examined), highlight=False)
    raise typer.Exit(1 if examined.errors else 0)


def show(
    path: _GraphPath,
    *,
    picture: Annotated[PictureFormat, typer.Option("--format", help="how to show it")] = PictureFormat.TEXT,
    output: Annotated[
        Path | None, typer.Option(help="write to this file instead of standard output", show_default=False)
    ] = None,
) -> None:
    """Draw a graph: its nodes in layers, streams with their tags, input policies and back edges."""
    from ovmstrio.graphs.drawing import draw, to_mermaid, to_svg

    examined = _examine(path)
    if examined.config is None:
        show_problems(examined.problems)
        raise typer.Exit(1)
    drawing = draw(examined.config)
    if picture is PictureFormat.TEXT:
        from ovms_cli.graph_text import to_text

        text = to_text(drawing, plain=output is not None)
    else:
        text = to_svg(drawing) if picture is PictureFormat.SVG else to_mermaid(drawing)
    _write(text, output)
    if examined.errors:
        hint = f"see: ovms graph check {path}"
        stderr().print(f"{count_problems(examined.problems)}; {safe(hint)}", highlight=False, soft_wrap=True)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{output}: {error.strerror or error}")


def _examine(path: Path) -> Examination:
    from ovmstrio.graphs.examining import examine_graph

    file = path / _DEFAULT_NAME if path.is_dir() else path
    if not file.is_file():
        fail(f"{file}: no such file; give a graph.pbtxt, or the directory that it is in", EX_USAGE)
    return examine_graph(file)


def _print_json(examined: Examination) -> None:
    import json
    from dataclasses import asdict

    errors = len(examined.errors)
    facts = {
        "ok": not errors,
        "errors": errors,
        "warnings": len(examined.problems) - errors,
        "problems": [asdict(problem) for problem in examined.problems],
    }
    typer.echo(json.dumps(facts, indent=2))


def _summary(examined: Examination) -> str:
    if examined.problems:
        mark = "[bold red]not ok[/]" if examined.errors else "[bold green]ok[/]"
        return f"{mark}: {count_problems(examined.problems)}"
    nodes = 0 if examined.config is None else len(examined.config.nodes)
    return f"[bold green]ok[/]: {count(nodes, 'node')}, no problem found"
