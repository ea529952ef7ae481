"""What a running pipeline of Ops shows of itself: its picture, and what each Op has done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.inspection import Inside

if TYPE_CHECKING:
    from ovmstrio.core.drawing import Drawing
    from ovmstrio.runtimes.ops.observing.figures import PipelineFigures

__all__ = ["look_inside"]


def look_inside(figures: PipelineFigures, drawing: Drawing | None) -> Inside:
    """Join a picture, whose nodes have the names of Ops, with what is known of these."""
    layers = () if drawing is None else drawing.layers
    keys = {box.title: box.key for layer in layers for box in layer if box.kind == "node"}
    waiting: dict[str, int] = {}
    for channel in figures.channels:
        for key in {keys[name] for name in channel.consumers if name in keys}:
            waiting[key] = waiting.get(key, 0) + channel.size
    nodes = {keys[name]: tally for name, tally in figures.tallies.items() if name in keys}
    facts = {
        "requests under way": figures.running,
        "clients that left": figures.left,
        "worker deaths": sum(each.deaths for each in figures.totals.values()),
    }
    return Inside(drawing, facts, nodes, waiting=waiting)
