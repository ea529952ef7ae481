"""What a running pipeline of Ops shows of itself: its picture, and what each Op has done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.core.inspection import Inside, NodeTally

if TYPE_CHECKING:
    from ovmstrio.core.drawing import Drawing
    from ovmstrio.runtimes.ops.observing.figures import OpFigures, PipelineFigures
    from ovmstrio.runtimes.ops.observing.hooks import Stage

__all__ = ["look_inside"]

_WORK: Final[tuple[Stage, ...]] = ("prep", "midp", "postp")
"""The stages in which an Op works; in the others it waits."""


def look_inside(figures: PipelineFigures, drawing: Drawing | None) -> Inside:
    """Join a picture, whose nodes have the names of Ops, with what is known of these."""
    layers = () if drawing is None else drawing.layers
    keys = {box.title: box.key for layer in layers for box in layer if box.kind == "node"}
    waiting: dict[str, int] = {}
    for channel in figures.channels:
        for key in {keys[name] for name in channel.consumers if name in keys}:
            waiting[key] = waiting.get(key, 0) + channel.size
    nodes = {keys[name]: _tally(each) for name, each in figures.totals.items() if name in keys}
    facts = {
        "requests under way": figures.running,
        "clients that left": figures.left,
        "worker deaths": sum(each.deaths for each in figures.totals.values()),
    }
    return Inside(drawing, facts, nodes, waiting=waiting)


def _tally(of_op: OpFigures) -> NodeTally:
    """Count batches as runs: what an Op does at once."""
    tally = NodeTally()
    tally.runs = max((of_op.counts.get(stage, 0) for stage in _WORK), default=0)
    tally.seconds = sum(of_op.seconds.get(stage, 0.0) for stage in _WORK)
    return tally
