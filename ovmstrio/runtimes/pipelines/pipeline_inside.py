"""What a loaded pipeline shows of itself: its picture, and what was counted at each part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.inspection import Inside
from ovmstrio.runtimes.pipelines.pipeline_drawing import draw
from ovmstrio.runtimes.pipelines.structure import EXIT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.config.specs import PipelineSpec
    from ovmstrio.core.inspection import NodeTally, StreamTally
    from ovmstrio.runtimes.pipelines.pipeline_plan import NodePlan

__all__ = ["look_inside"]


def look_inside(spec: PipelineSpec, entry: NodePlan, tallies: Mapping[str, NodeTally]) -> Inside:
    """Join the picture of a pipeline with what its nodes, by their names, and the connections from its entry count."""
    drawing = draw(spec)
    keys = {node.name: f"n{number}" for number, node in enumerate(spec.nodes)}
    targets = {key: name for name, key in keys.items()}
    outputs = {f"o{number}": given.name for number, given in enumerate(spec.outputs)}
    links = _links(entry)
    streams = {}
    for number, edge in enumerate(drawing.edges):
        is_exit = edge.target in outputs
        end = (EXIT, outputs[edge.target]) if is_exit else (targets[edge.target], edge.target_tag)
        if end in links:
            streams[number] = links[end]
    return Inside(drawing, nodes={keys[name]: tally for name, tally in tallies.items()}, streams=streams)


def _links(entry: NodePlan) -> dict[tuple[str, str], StreamTally]:
    """Give what counts at each connection, by where it ends."""
    found: dict[tuple[str, str], StreamTally] = {}
    seen, waiting = {entry.name}, [entry]
    while waiting:
        node = waiting.pop()
        for link in node.links:
            found[link.target.name, link.name] = link.tally
            if link.target.name not in seen:
                seen.add(link.target.name)
                waiting.append(link.target)
    return found
