"""Diagrams of graphs and pipelines, as Mermaid and SVG.

A diagram has layers of boxes and the edges between them.  A box is a node, an input or an output.  Each box is below
all boxes that feed it; only back edges lead up.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# ----------------------------------------------------------------------
# Boxes and edges
# ----------------------------------------------------------------------

BoxKind = Literal["input", "node", "output"]


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A node with its name, its type (``subtitle``) and notes; or an input or output with its name."""

    key: str
    kind: BoxKind
    title: str
    subtitle: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """A stream between two boxes, with its tags at both ends (empty without a tag)."""

    source: str
    target: str
    stream: str
    source_tag: str = ""
    target_tag: str = ""
    is_back: bool = False
    is_side: bool = False

    @property
    def label(self) -> str:
        """Return the stream's name between the tags of both ends."""
        return " ".join(part for part in (self.source_tag, self.stream, self.target_tag) if part)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes from top to bottom, and edges in the order of the file."""

    layers: tuple[tuple[DrawnBox, ...], ...]
    edges: tuple[DrawnEdge, ...]


def arrange(
    inputs: Sequence[DrawnBox], nodes: Sequence[DrawnBox], outputs: Sequence[DrawnBox], edges: Sequence[DrawnEdge]
) -> Drawing:  # fmt: skip
    """Arrange the boxes in layers: inputs, nodes below all nodes that feed them, outputs.  Cycles are cut."""
    by_key = {box.key: box for box in nodes}
    inner = [edge for edge in edges if edge.source in by_key and edge.target in by_key and not edge.is_back]
    middle = [tuple(by_key[key] for key in layer) for layer in _layers(list(by_key), inner)]
    layers = [tuple(inputs), *middle, tuple(outputs)]
    return Drawing(tuple(layer for layer in layers if layer), tuple(edges))


def _layers(keys: list[str], edges: list[DrawnEdge]) -> list[list[str]]:
    """Sort the keys topologically; a cycle is cut at its first key in the file."""
    feeders = {key: {edge.source for edge in edges if edge.target == key} - {key} for key in keys}
    layers: list[list[str]] = []
    while feeders:
        layer = [key for key, wanted in feeders.items() if not wanted] or [next(iter(feeders))]
        layers.append(layer)
        feeders = {key: wanted - set(layer) for key, wanted in feeders.items() if key not in layer}
    return layers


# ----------------------------------------------------------------------
# Mermaid flowcharts, which code hosts and many editors render in Markdown
# ----------------------------------------------------------------------

_SHAPES: Final = {"input": ("([", "])"), "node": ("[", "]"), "output": ("([", "])")}


def to_mermaid(drawing: Drawing) -> str:
    """Return a Mermaid flowchart from top to bottom, with dotted back edges and thick side packets."""
    lines = ["flowchart TB"]
    lines += [f"  {_mermaid_box(box)}" for layer in drawing.layers for box in layer]
    lines += [f"  {_mermaid_edge(edge)}" for edge in drawing.edges]
    return "\n".join(lines) + "\n"


def _mermaid_box(box: DrawnBox) -> str:
    opening, closing = _SHAPES[box.kind]
    text = "<br/>".join(_escape_mermaid(line) for line in (box.title, box.subtitle, *box.notes) if line)
    return f'{box.key}{opening}"{text}"{closing}'


def _mermaid_edge(edge: DrawnEdge) -> str:
    arrow = "-.->" if edge.is_back else "==>" if edge.is_side else "-->"
    return f'{edge.source} {arrow}|"{_escape_mermaid(edge.label)}"| {edge.target}'


def _escape_mermaid(text: str) -> str:
    # Mermaid has its own escapes, in which # replaces & of HTML.
    for sign, name in (("&", "#amp;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(sign, name)
    return " ".join(text.split())


# ----------------------------------------------------------------------
# Self-contained SVG images
# ----------------------------------------------------------------------

_CHARACTER: Final = 7.3
_LINE: Final = 17
_PADDING: Final = 12
_GAP_X: Final = 60
_GAP_Y: Final = 78
_MARGIN: Final = 24
_STYLE: Final = """
  text { font: 12px ui-monospace, monospace; fill: #1c2733; text-anchor: middle }
  .title { font-weight: bold } .label { font-size: 10.5px; fill: #44576b; paint-order: stroke; stroke: #fff;
  stroke-width: 4px } .node { fill: #e8f1fb; stroke: #2f6db3 } .input, .output { fill: #f1f6ec; stroke: #5f8f3d }
  path { fill: none; stroke: #5a6b7d; stroke-width: 1.4 } .back { stroke: #b3452f; stroke-dasharray: 6 4 }
  .side { stroke: #8a63b3; stroke-width: 2.2 } .tip { fill: #5a6b7d; stroke: none }
"""


class _Frame(NamedTuple):
    """Position and size of a box."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def to_svg(drawing: Drawing) -> str:
    """Return an SVG image with the layers from top to bottom, dashed back edges and thick side packets."""
    frames, width, height = _place_boxes(drawing)
    lane = width + _MARGIN
    parts = [_svg_edge(edge, drawing, frames, lane) for edge in drawing.edges]
    parts += [_svg_box(box, frames[box.key]) for layer in drawing.layers for box in layer]
    loops = any(edge.is_back for edge in drawing.edges)
    longest = max((len(edge.label) for edge in drawing.edges if edge.is_back), default=0)
    total = lane + (longest * _CHARACTER / 2 + _MARGIN * 2 if loops else 0)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {height:.0f}" width="{total:.0f}">'
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker>'
    )
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", f"<defs>{tip}</defs>", background, *parts, "</svg>", ""])


def _text_lines(box: DrawnBox) -> list[str]:
    return [line for line in (box.title, box.subtitle, *box.notes) if line]


def _place_boxes(drawing: Drawing) -> tuple[dict[str, _Frame], float, float]:
    """Centre the layers below each other; return the frames, and the total width and height."""
    sizes = {
        box.key: (max(map(len, _text_lines(box))) * _CHARACTER + 2 * _PADDING, len(_text_lines(box)) * _LINE + _PADDING)
        for layer in drawing.layers
        for box in layer
    }
    widths = [sum(sizes[box.key][0] for box in layer) + _GAP_X * (len(layer) - 1) for layer in drawing.layers]
    widest = max(widths, default=0.0)
    frames: dict[str, _Frame] = {}
    y = float(_MARGIN)
    for layer, width in zip(drawing.layers, widths, strict=True):
        x = _MARGIN + (widest - width) / 2
        for box in layer:
            frames[box.key] = _Frame(x, y, *sizes[box.key])
            x += sizes[box.key][0] + _GAP_X
        y += max(sizes[box.key][1] for box in layer) + _GAP_Y
    return frames, widest + _MARGIN, y - _GAP_Y + _MARGIN


def _svg_box(box: DrawnBox, frame: _Frame) -> str:
    radius = 6 if box.kind == "node" else 14
    shape = (
        f'<rect class="{box.kind}" x="{frame.x:.1f}" y="{frame.y:.1f}" width="{frame.width:.1f}" '
        f'height="{frame.height:.1f}" rx="{radius}"/>'
    )
    texts = [
        f'<text{"" if number else " class=" + chr(34) + "title" + chr(34)} x="{frame.middle:.1f}" '
        f'y="{frame.y + _PADDING / 2 + _LINE * (number + 0.75):.1f}">{escape(line)}</text>'
        for number, line in enumerate(_text_lines(box))
    ]
    return "".join([shape, *texts])


def _svg_edge(edge: DrawnEdge, drawing: Drawing, frames: dict[str, _Frame], lane: float) -> str:
    source, target = frames[edge.source], frames[edge.target]
    if target.y <= source.y:
        return _svg_back_edge(edge, source, target, lane)
    start, end = _end_positions(edge, drawing, frames)
    top, bottom = source.y + source.height, target.y
    bend = (bottom - top) / 2
    curve = f"M{start:.1f} {top:.1f}C{start:.1f} {top + bend:.1f} {end:.1f} {bottom - bend:.1f} {end:.1f} {bottom:.1f}"
    # A label nearer to its edge's target does not overlap the labels of other edges from the same source.
    return _svg_path(edge, curve, start * 0.35 + end * 0.65, bottom - (bottom - top) * 0.3)


def _svg_back_edge(edge: DrawnEdge, source: _Frame, target: _Frame, lane: float) -> str:
    right, low, high = source.x + source.width, source.y + source.height * 0.7, target.y + target.height * 0.3
    end = target.x + target.width
    curve = (
        f"M{right:.1f} {low:.1f}C{lane + 30:.1f} {low + 30:.1f} {lane + 30:.1f} {high - 30:.1f} {end:.1f} {high:.1f}"
    )
    return _svg_path(edge, curve, lane, (low + high) / 2)


def _svg_path(edge: DrawnEdge, curve: str, x: float, y: float) -> str:
    kind = "back" if edge.is_back else "side" if edge.is_side else "stream"
    label = f'<text class="label" x="{x:.1f}" y="{y:.1f}">{escape(edge.label)}</text>'
    return f'<path class="{kind}" d="{curve}" marker-end="url(#tip)"/>{label}'


def _end_positions(edge: DrawnEdge, drawing: Drawing, frames: dict[str, _Frame]) -> tuple[float, float]:
    """Return the x positions of both ends, spread among the edges of the same boxes."""
    leaving = [each for each in drawing.edges if each.source == edge.source and not each.is_back]
    coming = [each for each in drawing.edges if each.target == edge.target and not each.is_back]
    source, target = frames[edge.source], frames[edge.target]
    share_out = (leaving.index(edge) + 1) / (len(leaving) + 1) if edge in leaving else 0.5
    share_in = (coming.index(edge) + 1) / (len(coming) + 1) if edge in coming else 0.5
    return source.x + source.width * share_out, target.x + target.width * share_in
