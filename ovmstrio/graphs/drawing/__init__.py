"""Pictures of graphs: boxes in layers, and as Mermaid text or SVG."""

from __future__ import annotations

from ovmstrio.graphs.drawing.layers import Box, Drawing, Edge, draw
from ovmstrio.graphs.drawing.mermaid import to_mermaid
from ovmstrio.graphs.drawing.svg import to_svg

__all__ = ["Box", "Drawing", "Edge", "draw", "to_mermaid", "to_svg"]
