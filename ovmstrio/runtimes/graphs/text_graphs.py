"""Graphs that consist of one model of text, as OpenVINO Model Server writes them: they are served as that model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ovmstrio.config.findings import Findings
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.runtimes.graphs.calculators.text_models import HTTP_LLM, PAYLOADS, TEXT_CALCULATORS
from ovmstrio.runtimes.graphs.calculators.text_node_options import read_node_options
from ovmstrio.runtimes.graphs.config.graph_file import examine_text
from ovmstrio.runtimes.graphs.examining import examine_graph
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.specs import GraphSpec
    from ovmstrio.core.errors import Problem
    from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig

__all__ = ["TextGraph", "paths_of_models", "read_text_graph"]


class TextGraph(NamedTuple):
    """What a graph's file says: the model, what is odd with it, and the content of the file."""

    spec: TextModelSpec
    warnings: tuple[Problem, ...]
    content: bytes


def read_text_graph(spec: GraphSpec, cache_dir: Path | None = None) -> TextGraph | None:
    """Read a graph's file as one model of text; None for any other graph, and what cannot be read at all.  Blocks.

    What is wrong with the file are problems of the model, with its lines.
    """
    try:
        content = read_regular_bytes(spec.graph_path)
    except OSError:
        return None
    examined = examine_graph(spec.graph_path, spec.base_path)
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


def paths_of_models(content: str, directory: Path) -> tuple[Path, ...]:
    """Give the files and folders that nodes of a graph name which make text; what cannot be read names none."""
    config = examine_text(content, "").config
    found: list[Path] = []
    for node in config.nodes if config is not None else ():
        if node.calculator == HTTP_LLM.name:
            fields, _ = read_node_options(node, HTTP_LLM.task, HTTP_LLM.options, directory, Findings(""))
            found += [fields[name] for name in ("path", "draft_path") if name in fields]
    return tuple(found)


def _check_streams(graph: GraphConfig, findings: Findings) -> None:
    """See that the graph itself takes and gives documents of HTTP, by its tags."""
    for kind, refs, tags in (("input", graph.inputs, PAYLOADS[:2]), ("output", graph.outputs, PAYLOADS[2:])):
        for ref in refs:
            if ref.port.tag not in tags:
                findings.refuse(
                    ref.at,
                    f"the {kind} of a graph of {graph.nodes[0].calculator} is a document of HTTP",
                    expected=" or ".join(tags),
                    found=ref.port.tag or "no tag",
                    suggestion=f'write {kind}_stream: "{tags[0]}:{ref.name}"',
                )
