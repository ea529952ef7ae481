"""Pictures of what is wired together: boxes in layers, and as Mermaid text or SVG."""

from __future__ import annotations

from ovmstrio.drawing.boxes import Box, BoxKind, Drawing, Edge, arrange
from ovmstrio.drawing.mermaid import to_mermaid
from ovmstrio.drawing.svg import to_svg

__all__ = ["Box", "BoxKind", "Drawing", "Edge", "arrange", "to_mermaid", "to_svg"]
