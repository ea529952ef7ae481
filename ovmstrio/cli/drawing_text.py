"""Drawing of a graph in the terminal: the boxes of each layer side by side, with their inputs and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.columns import Columns
from rich.panel import Panel
from rich.text import Text

from ovmstrio.cli.console import escaping_console, stdout

if TYPE_CHECKING:
    from ovmstrio.util.drawing import Drawing, DrawnBox, DrawnEdge

_COLOURS: Final = {"input": "green", "node": "cyan", "output": "green"}
_NARROWEST: Final = 20


def to_text(drawing: Drawing, *, plain: bool = False) -> str:
    """Draw in the width of the terminal; without colours if ``plain``."""
    console = escaping_console(width=stdout().width, no_color=True, color_system=None) if plain else stdout()
    titles = {box.key: box.title for layer in drawing.layers for box in layer}
    with console.capture() as captured:
        for number, layer in enumerate(drawing.layers):
            if number:
                console.print("  ↓", style="dim")
            console.print(Columns([_panel(box, drawing, titles) for box in layer], padding=(0, 1)))
    return captured.get()


def _panel(box: DrawnBox, drawing: Drawing, titles: dict[str, str]) -> Panel:
    lines = [Text(box.subtitle, style="bold")] if box.subtitle else []
    lines += [Text(note, style="yellow") for note in box.notes]
    lines += [_incoming(edge, titles) for edge in drawing.edges if edge.target == box.key]
    lines += [_outgoing(edge, titles) for edge in drawing.edges if edge.source == box.key]
    width = max([_NARROWEST, len(box.title) + 4, *(line.cell_len for line in lines)]) + 4
    return Panel(
        Text("\n").join(lines), title=Text(box.title), title_align="left", border_style=_COLOURS[box.kind],
        width=min(width, stdout().width),
    )  # fmt: skip


def _incoming(edge: DrawnEdge, titles: dict[str, str]) -> Text:
    back = "  ↺ back edge" if edge.is_back else "  side packet" if edge.is_side else ""
    name = f"{edge.target_tag}:{edge.stream}" if edge.target_tag else edge.stream
    return Text(f"← {name} from {titles[edge.source]}{back}", style="magenta" if edge.is_back else "")


def _outgoing(edge: DrawnEdge, titles: dict[str, str]) -> Text:
    name = f"{edge.source_tag}:{edge.stream}" if edge.source_tag else edge.stream
    return Text(f"→ {name} to {titles[edge.target]}", style="magenta" if edge.is_back else "dim")
