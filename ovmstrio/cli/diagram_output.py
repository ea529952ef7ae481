"""Diagrams of graphs and pipelines as terminal text, Mermaid, SVG or JSON, and the options for them."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.console import fail
from ovmstrio.util.truncation import escape_controls

if TYPE_CHECKING:
    from ovmstrio.util.drawing import Drawing


class PictureFormat(StrEnum):
    """Format of a drawing."""

    TEXT = "text"
    MERMAID = "mermaid"
    SVG = "svg"
    JSON = "json"


PictureOption = Annotated[
    PictureFormat, typer.Option("--format", metavar="|".join(PictureFormat), help="Format of the drawing.")
]
DrawingJsonOption = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
FileOption = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write to this file instead of standard output.")
]


def render(drawing: Drawing, picture: PictureFormat, *, plain: bool) -> str:
    """Render a drawing; terminal text has no colours if ``plain``."""
    if picture is PictureFormat.TEXT:
        from ovmstrio.cli.drawing_text import to_text

        return to_text(drawing, plain=plain)
    if picture is PictureFormat.JSON:
        return json.dumps(asdict(drawing), indent=2) + "\n"
    from ovmstrio.util.drawing import to_mermaid, to_svg

    text = to_svg(drawing) if picture is PictureFormat.SVG else to_mermaid(drawing)
    return escape_controls(text, keep="\n\t")


def write_picture(text: str, output: Path | None) -> None:
    """Write to a file, or to standard output if there is none."""
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{output}: {error.strerror or error}")
