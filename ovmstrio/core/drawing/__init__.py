"""Pictures of what is wired together: boxes in layers, and as Mermaid text or SVG."""

from __future__ import annotations

from ovmstrio.core.drawing.boxes import BoxKind, Drawing, DrawnBox, DrawnEdge, arrange
from ovmstrio.core.drawing.mermaid import to_mermaid
from ovmstrio.core.drawing.svg import to_svg

__all__ = ["BoxKind", "Drawing", "DrawnBox", "DrawnEdge", "arrange", "to_mermaid", "to_svg"]
