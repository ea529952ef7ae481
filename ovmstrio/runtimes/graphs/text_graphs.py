"""Graphs that consist of one model of text, as OpenVINO Model Server writes them: they are served as that model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.config.findings import Findings
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.config.text_options import read_text_options
from ovmstrio.core.errors import Problem
from ovmstrio.runtimes.graphs.calculators.nodes import options_of
from ovmstrio.runtimes.graphs.calculators.text_models import PAYLOADS, TEXT_CALCULATORS, TextModelCalculator
from ovmstrio.runtimes.graphs.examining import examine_graph

if TYPE_CHECKING:
    from ovmstrio.config.located import Located
    from ovmstrio.config.specs import GraphSpec
    from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, NodeConfig

__all__ = ["TextGraph", "read_text_graph"]

_PATH: Final = "models_path"
_SPELT: Final[Mapping[str, str]] = {"device": "target_device", "normalize_embeddings": "normalize"}
"""Options that a graph calls otherwise than all else does."""
_UNMENTIONED: Final = frozenset({_PATH})


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
        content = spec.graph_path.read_bytes()
    except OSError:
        return None
    examined = examine_graph(spec.graph_path, spec.base_path)
    graph = examined.config
    if graph is None or len(graph.nodes) != 1 or graph.nodes[0].calculator not in TEXT_CALCULATORS:
        return None
    node = graph.nodes[0]
    calculator = TEXT_CALCULATORS[node.calculator]
    given = _given_options(node, calculator)
    fields, problems = read_text_options(calculator.task, given, spec.base_path)
    findings = Findings(graph.file)
    _check_streams(graph, findings)
    path = _models_path(node, calculator, spec.base_path)
    placed = (_placed(problem, node, calculator, findings) for problem in problems)
    made = TextModelSpec(
        **spec.model_dump(include={"name", "base_path", "origin", "max_concurrency"}),
        path=path,
        task=calculator.task,
        cache_dir=cache_dir,
        problems=(*spec.problems, *examined.errors, *findings.all, *placed),
        place=spec.place,
        **fields,
    )
    return TextGraph(made, tuple(each for each in examined.problems if each.severity != "error"), content)


def _given_options(node: NodeConfig, calculator: TextModelCalculator) -> dict[str, Any]:
    """Give what the file says, by the names of options; texts of enumerations are their names."""
    message = options_of(node, calculator.options)
    if message is None:
        return {}
    given: dict[str, Any] = {}
    for known, value in message.ListFields():
        name = _SPELT.get(known.name, known.name)
        if known.enum_type is not None:
            given[name] = known.enum_type.values_by_number[value].name
        elif known.is_repeated and known.message_type is not None:
            given[name] = [{inner.name: held for inner, held in each.ListFields()} for each in value]
        elif name not in _UNMENTIONED and (value or not isinstance(value, str)):
            given[name] = str(value) if known.message_type is not None else value
    return given


def _models_path(node: NodeConfig, calculator: TextModelCalculator, directory: Path) -> Path:
    message = options_of(node, calculator.options)
    return directory / (message.models_path if message is not None else "")


def _placed(problem: Problem, node: NodeConfig, calculator: TextModelCalculator, findings: Findings) -> Problem:
    """Point at the option in the file, which may be in ``node_options`` or ``options``."""
    written = {option: name for name, option in _SPELT.items()}
    option, *_ = problem.path.split(".")
    for options in _all_options(node, calculator):
        name = option if option in options.members else written.get(option, option)
        if name in options.members:
            return replace(findings.place(options, replace(problem, path=name)))
    return findings.place(node.at, replace(problem, path=""))


def _all_options(node: NodeConfig, calculator: TextModelCalculator) -> list[Located]:
    packed = [each for item in node.at.items("node_options") for each in item.members.values()]
    return [*packed, node.at.find("options", f"{calculator.options}.ext")]


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
