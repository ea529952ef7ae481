"""Graphs whose only node is a text model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ovmstrio.config.documents import Findings
from ovmstrio.config.specs import TextModelSpec
from ovmstrio.core.errors import Problem
from ovmstrio.graphs.calculators.text import PAYLOADS

if TYPE_CHECKING:
    from ovmstrio.graphs.graph_config import GraphConfig

__all__ = ["TextGraph"]


class TextGraph(NamedTuple):
    """A graph file that is one text model: its spec, warnings and content."""

    spec: TextModelSpec
    warnings: tuple[Problem, ...]
    content: bytes


def _check_streams(graph: GraphConfig, findings: Findings) -> None:
    for kind, refs, tags in (("input", graph.inputs, PAYLOADS[:2]), ("output", graph.outputs, PAYLOADS[2:])):
        for ref in refs:
            if ref.port.tag not in tags:
                findings.refuse(
                    ref.at,
                    f"the {kind} of a graph with {graph.nodes[0].calculator} must be an HTTP payload",
                    expected=" or ".join(tags),
                    found=ref.port.tag or "no tag",
                    suggestion=f'write {kind}_stream: "{tags[0]}:{ref.name}"',
                )
