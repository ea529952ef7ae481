"""The boxes of a picture, layer by layer, and the edges between them.

A box is a node, or something that enters or leaves the whole.  It is below everything that feeds it, but for back
edges, which lead up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BoxKind", "Drawing", "DrawnBox", "DrawnEdge", "arrange"]

BoxKind = Literal["input", "node", "output"]


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A node by its name, with what it runs and what is special about it; or something at the border by its name."""

    key: str
    kind: BoxKind
    title: str
    subtitle: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """What goes from box to box; tags, which are its names at either end, are empty where there are none."""

    source: str
    target: str
    stream: str
    source_tag: str = ""
    target_tag: str = ""
    is_back: bool = False
    is_side: bool = False

    @property
    def label(self) -> str:
        """The stream with its tags on both ends."""
        return " ".join(part for part in (self.source_tag, self.stream, self.target_tag) if part)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes from top to bottom, and edges in the order of the file."""

    layers: tuple[tuple[DrawnBox, ...], ...]
    edges: tuple[DrawnEdge, ...]


def arrange(
    inputs: Sequence[DrawnBox], nodes: Sequence[DrawnBox], outputs: Sequence[DrawnBox], edges: Sequence[DrawnEdge]
) -> Drawing:  # fmt: skip
    """Put each node below all that feed it, between inputs and outputs; cycles are cut somewhere."""
    by_key = {box.key: box for box in nodes}
    inner = [edge for edge in edges if edge.source in by_key and edge.target in by_key and not edge.is_back]
    middle = [tuple(by_key[key] for key in layer) for layer in _layers(list(by_key), inner)]
    layers = [tuple(inputs), *middle, tuple(outputs)]
    return Drawing(tuple(layer for layer in layers if layer), tuple(edges))


def _layers(keys: list[str], edges: list[DrawnEdge]) -> list[list[str]]:
    """Order the keys; where a cycle leaves nobody, the first of the file goes."""
    feeders = {key: {edge.source for edge in edges if edge.target == key} - {key} for key in keys}
    layers: list[list[str]] = []
    while feeders:
        layer = [key for key, wanted in feeders.items() if not wanted] or [next(iter(feeders))]
        layers.append(layer)
        feeders = {key: wanted - set(layer) for key, wanted in feeders.items() if key not in layer}
    return layers
