"""Detection of graph files that are a single text model, and their conversion to text-model specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ovmstrio.config.documents import Findings
from ovmstrio.config.specs import GraphSpec, TextModelSpec
from ovmstrio.core.errors import Problem
from ovmstrio.graphs.calculators.text import HTTP_LLM, PAYLOAD_TAGS, TEXT_CALCULATORS, read_node_options
from ovmstrio.graphs.graph_file import parse_graph_text
from ovmstrio.graphs.validate import validate_graph
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.graphs.graph_config import GraphConfig


class TextGraph(NamedTuple):
    """A graph file that is one text model: its spec, warnings and content."""

    spec: TextModelSpec
    warnings: tuple[Problem, ...]
    content: bytes


def _check_streams(graph: GraphConfig, findings: Findings) -> None:
    for kind, refs, tags in (("input", graph.inputs, PAYLOAD_TAGS[:2]), ("output", graph.outputs, PAYLOAD_TAGS[2:])):
        for ref in refs:
            if ref.port.tag not in tags:
                findings.refuse(
                    ref.at,
                    f"the {kind} of a graph with {graph.nodes[0].calculator} must be an HTTP payload",
                    expected=" or ".join(tags),
                    found=ref.port.tag or "no tag",
                    suggestion=f'write {kind}_stream: "{tags[0]}:{ref.name}"',
                )


def read_text_graph(spec: GraphSpec, cache_dir: Path | None = None) -> TextGraph | None:
    """Parse a graph file as one text model; None for any other graph or an unreadable file. Reads the disk.

    Errors of the file become problems of the model.
    """
    try:
        content = read_regular_bytes(spec.graph_path)
    except OSError:
        return None
    examined = validate_graph(spec.graph_path, spec.base_path)
    graph = examined.config
    if graph is None or len(graph.nodes) != 1 or graph.nodes[0].calculator not in TEXT_CALCULATORS:
        return None
    node = graph.nodes[0]
    calculator = TEXT_CALCULATORS[node.calculator]
    findings = Findings(graph.file)
    _check_streams(graph, findings)
    fields, problems = read_node_options(node, calculator.task, calculator.options, spec.base_path, findings)
    made = TextModelSpec(
        **spec.model_dump(include={"name", "base_path", "origin", "max_concurrency"}),
        task=calculator.task,
        cache_dir=cache_dir,
        problems=(*spec.problems, *examined.errors, *findings.all, *problems),
        place=spec.place,
        **fields,
    )
    return TextGraph(made, tuple(each for each in examined.problems if each.severity != "error"), content)


def text_model_paths(content: str, directory: Path) -> tuple[Path, ...]:
    """Return the model and draft paths of a graph's text-generation nodes; none if the file cannot be parsed."""
    config = parse_graph_text(content, "").config
    found: list[Path] = []
    for node in config.nodes if config is not None else ():
        if node.calculator == HTTP_LLM.name:
            fields, _ = read_node_options(node, HTTP_LLM.task, HTTP_LLM.options, directory, Findings(""))
            found += [fields[name] for name in ("path", "draft_path") if name in fields]
    return tuple(found)
