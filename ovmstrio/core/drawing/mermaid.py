"""Pictures as Mermaid flowcharts, which forges and many editors show in Markdown."""

from __future__ import annotations

from typing import Final

from ovmstrio.core.drawing.boxes import Drawing, DrawnBox, DrawnEdge

__all__ = ["to_mermaid"]

_SHAPES: Final = {"input": ("([", "])"), "node": ("[", "]"), "output": ("([", "])")}


def to_mermaid(drawing: Drawing) -> str:
    """Write a flowchart from top to bottom; back edges are dotted, side packets thick."""
    lines = ["flowchart TB"]
    lines += [f"  {_box(box)}" for layer in drawing.layers for box in layer]
    lines += [f"  {_edge(edge)}" for edge in drawing.edges]
    return "\n".join(lines) + "\n"


def _box(box: DrawnBox) -> str:
    opening, closing = _SHAPES[box.kind]
    text = "<br/>".join(_quoted(line) for line in (box.title, box.subtitle, *box.notes) if line)
    return f'{box.key}{opening}"{text}"{closing}'


def _edge(edge: DrawnEdge) -> str:
    arrow = "-.->" if edge.is_back else "==>" if edge.is_side else "-->"
    return f'{edge.source} {arrow}|"{_quoted(edge.label)}"| {edge.target}'


def _quoted(text: str) -> str:
    """Keep what Mermaid or HTML would read."""
    for sign, name in (("&", "#amp;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(sign, name)
    return " ".join(text.split())
