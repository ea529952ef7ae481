"""Pipelines that call each other, of which none may come to call itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from ovmstrio.config.specs import PipelineSpec
from ovmstrio.core.errors import Problem

__all__ = ["refuse_circles"]


def refuse_circles(pipelines: Sequence[PipelineSpec]) -> list[PipelineSpec]:
    """Give the pipelines, those with a problem more that call themselves through others.

    This cannot be left to their loading: while another configuration is taken over, each finds the others as they were.
    """
    names = {pipeline.name for pipeline in pipelines}
    calls = {
        pipeline.name: {node.model_name: None for node in pipeline.nodes if node.model_name in names - {pipeline.name}}
        for pipeline in pipelines
    }
    return [_refuse(pipeline, _way_back(pipeline.name, calls)) for pipeline in pipelines]


def _refuse(pipeline: PipelineSpec, way: Sequence[str]) -> PipelineSpec:
    if not way:
        return pipeline
    file, _, line = pipeline.origin.rpartition(":")
    problem = Problem(
        f"PIPELINE_CALLS_ITSELF: it calls itself through others: {' -> '.join(way)}",
        file=file,
        line=int(line),
        suggestion="have one of them call a model instead",
    )
    return pipeline.model_copy(update={"problems": (*pipeline.problems, problem)})


def _way_back(start: str, calls: Mapping[str, Iterable[str]]) -> Sequence[str]:
    """Give the shortest way from a pipeline to itself; empty if there is none."""
    ways: deque[tuple[str, ...]] = deque([(start,)])
    seen = {start}
    while ways:
        way = ways.popleft()
        for callee in calls[way[-1]]:
            if callee == start:
                return (*way, start)
            if callee not in seen:
                seen.add(callee)
                ways.append((*way, callee))
    return ()
