"""Pipelines of Ops as pictures: a box for each Op, with what it calls and how it is worked on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.drawing import Drawing, DrawnBox, DrawnEdge, arrange
from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings
from ovmstrio.runtimes.ops.config.precedence import settings_of

if TYPE_CHECKING:
    from ovmstrio.runtimes.ops.config.op_settings import OpSettings
    from ovmstrio.runtimes.ops.graph import OpGraph

__all__ = ["draw"]


def draw(graph: OpGraph, settings: PipelineSettings | None = None) -> Drawing:
    """Arrange a pipeline, with the settings that hold for its Ops; jumps lead up."""
    settings = settings or PipelineSettings()
    keys = {name: f"n{number}" for number, name in enumerate(graph.ops)} | {graph.request.name: "i0"}
    boxes = [_box(keys[name], settings_of(op, settings), settings) for name, op in graph.ops.items()]
    edges = [
        DrawnEdge(keys[producer], keys[name], "") for name, producers in graph.inputs.items() for producer in producers
    ]
    edges += [
        DrawnEdge(keys[name], keys[target], "jump", is_back=True)
        for name, targets in graph.jumps.items()
        for target in targets
    ]
    edges.append(DrawnEdge(keys[graph.last], "o0", ""))
    return arrange([DrawnBox("i0", "input", "request")], boxes, [DrawnBox("o0", "output", "response")], edges)


def _box(key: str, op: OpSettings, settings: PipelineSettings) -> DrawnBox:
    return DrawnBox(key, "node", op.name, _runs(op), tuple(_notes(op, settings)))


def _runs(op: OpSettings) -> str:
    """Say what an Op calls."""
    if op.server_endpoints:
        return f"{op.client_type or 'remote'} at {', '.join(op.server_endpoints)}"
    model = op.local_service_conf.model_config
    return "no model" if model is None else f"model {model}"


def _notes(op: OpSettings, settings: PipelineSettings) -> list[str]:
    """Say what is not as it is by default."""
    kind = "thread" if settings.dag.is_thread_op else "process"
    notes = [f"{op.concurrency} {kind}{'' if op.concurrency == 1 else 'es' if kind == 'process' else 's'}"]
    if op.batch_size > 1:
        wait = f", at most {op.auto_batching_timeout} ms" if op.batch_timeout_seconds else ""
        notes.append(f"batches of {op.batch_size}{wait}")
    if op.timeout_seconds:
        notes.append(f"times out after {op.timeout} ms{f', {op.retry} attempts' if op.retry > 1 else ''}")
    return notes
