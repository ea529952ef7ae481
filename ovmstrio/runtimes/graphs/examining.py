"""Examine a graph file: everything that can be known without running user code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ovmstrio.config.findings import Findings, by_line, did_you_mean
from ovmstrio.config.located import Located
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.runtimes.graphs.calculator import ContractError, NodeContract
from ovmstrio.runtimes.graphs.calculators import find_kind, known_names
from ovmstrio.runtimes.graphs.calculators.text_models import TEXT_CALCULATORS
from ovmstrio.runtimes.graphs.calculators.text_node import LOOPBACK
from ovmstrio.runtimes.graphs.calculators.text_node_options import read_node_options
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, NodeConfig
from ovmstrio.runtimes.graphs.config.graph_file import examine_text
from ovmstrio.runtimes.graphs.config.graph_messages import (
    HANDLER_MISSING,
    NODE_NAME_MISSING,
    NODE_NAME_TAKEN,
    NODE_OPTIONS_MISSING,
)
from ovmstrio.runtimes.graphs.config.wiring import check_wiring
from ovmstrio.runtimes.graphs.policies import policy_names
from ovmstrio.util.regular_files import read_regular_text

__all__ = ["Examination", "examine_graph", "handler_file"]

_PYTHON: Final = "PythonExecutorCalculator"
_PYTHON_OPTIONS: Final = "mediapipe.PythonExecutorCalculatorOptions"
_TOLD_OTHERWISE: Final = (NODE_NAME_MISSING, NODE_NAME_TAKEN, NODE_OPTIONS_MISSING)
_CANNOT_OPEN: Final = "File not found or cannot open"


@dataclass(frozen=True, slots=True)
class Examination:
    """What a graph file says, None where it cannot be read, and all that is wrong with it, by line."""

    config: GraphConfig | None
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems because of which the graph does not load."""
        return tuple(problem for problem in self.problems if problem.severity == "error")


def examine_graph(graph_path: Path, directory: Path | None = None) -> Examination:
    """Read a graph file, and check the contracts of its nodes and how they fit together.  Blocks on the disk.

    Relative paths in it lead on from ``directory``, by default its own.
    """
    file = str(graph_path)
    try:
        content = read_regular_text(graph_path)
    except OSError as error:
        return Examination(None, (Problem(f"{_CANNOT_OPEN} - {error.strerror or error}", file),))
    except UnicodeDecodeError as error:
        return Examination(None, (Problem(f"{_CANNOT_OPEN} - it is no UTF-8 text: {error.reason}", file),))
    reading = examine_text(content, file)
    problems = list(reading.problems)
    if reading.config is not None:
        certain = [node for node in reading.config.nodes if node.canonical_name not in reading.doubtful]
        asked = ((node, _contract(node) if node in certain else _unknown(node)) for node in reading.config.nodes)
        contracts = {node.canonical_name: contract for node, contract in asked if contract is not None}
        problems += check_wiring(reading.config, contracts, policy_names())
        problems += _check_text_models(reading.config, contracts, directory or graph_path.parent)
        problems += _check_python_nodes(reading.config, certain, directory or graph_path.parent)
    return Examination(reading.config, by_line(problems))


def handler_file(handler_path: str, directory: Path) -> Path:
    """Give the file that a Python node's ``handler_path`` stands for in a graph of this directory."""
    return directory / handler_path.replace("\\", "/")


def _contract(node: NodeConfig) -> NodeContract | ContractError | None:
    """Ask the node's calculator; None where what it says is told by the checks of Python nodes, with all the rest."""
    try:
        kind = find_kind(node.calculator)
    except ConfigError as error:
        return ContractError(error.message, code="NOT_FOUND")
    if kind is None:
        return _unknown(node)
    try:
        return kind.contract(node)
    except ContractError as error:
        return None if error.message.startswith(_TOLD_OTHERWISE) else error


def _unknown(node: NodeConfig) -> ContractError | None:
    """Say that there is no calculator of a node's name; None if there is, whatever else is wrong with the node."""
    names = known_names()
    if node.calculator in names:
        return None
    fix = did_you_mean(node.calculator, names, otherwise=f"there are: {', '.join(names)}")
    return ContractError(f'Unable to find Calculator "{node.calculator}"', fix=fix, code="NOT_FOUND")


def _check_text_models(
    graph: GraphConfig, contracts: Mapping[str, NodeContract | ContractError], directory: Path
) -> list[Problem]:
    """Check nodes that are whole models of text and stand among others, which those that make text may."""
    findings = Findings(graph.file)
    options: list[Problem] = []
    for node in graph.nodes if len(graph.nodes) > 1 else ():
        calculator = TEXT_CALCULATORS.get(node.calculator)
        if calculator is None or not isinstance(contracts.get(node.canonical_name), NodeContract):
            continue
        if calculator.task is not Task.TEXT_GENERATION:
            findings.refuse(
                node.at,
                f'node "{node.canonical_name}": a {node.calculator} is served as the only node of its graph',
                expected="1 node",
                found=f"{len(graph.nodes)} nodes",
                suggestion="give it a graph of its own, and let the other nodes' clients call that",
            )
            continue
        _check_text_node(graph, node, findings)
        options += read_node_options(node, calculator.task, calculator.options, directory, findings)[1]
    return [*findings.all, *options]


def _check_text_node(graph: GraphConfig, node: NodeConfig, findings: Findings) -> None:
    """See that a node that makes text can be asked for it, and for more than its first piece."""
    who = f'node "{node.canonical_name}": a {node.calculator} among other nodes'
    if not graph.payload:
        findings.refuse(
            node.at,
            f"{who} answers requests over HTTP, and the graph takes none",
            suggestion='let the only input_stream of the graph be "HTTP_REQUEST_PAYLOAD:name"',
        )
    if not {LOOPBACK} <= {ref.port for ref in node.inputs} & {ref.port for ref in node.outputs}:
        findings.refuse(
            node.at,
            f"{who} gives its answer piece by piece, and has no LOOPBACK that calls for the next one",
            suggestion='add input_stream and output_stream: "LOOPBACK:name", with the back edge and the '
            "SyncSetInputStreamHandler that graphs of this calculator have",
        )


def _check_python_nodes(graph: GraphConfig, certain: Sequence[NodeConfig], directory: Path) -> list[Problem]:
    findings = Findings(graph.file)
    first: dict[str, int] = {}
    for node in graph.nodes:
        if node.calculator != _PYTHON or node not in certain:
            continue
        if not node.name:
            findings.refuse(node.at, f"{NODE_NAME_MISSING} - a Python node needs one", suggestion='add name: "..."')
        elif node.name in first:
            fix = f"use another name; the node of line {first[node.name]} has this one"
            at = Located(None, node.line, f"{node.at.path}.name")
            findings.refuse(at, f'{NODE_NAME_TAKEN} - "{node.name}" is given twice', suggestion=fix)
        first.setdefault(node.name, node.line)
        _check_options(node, directory, findings)
    return list(findings.all)


def _check_options(node: NodeConfig, directory: Path, findings: Findings) -> None:
    options = next((each for each in node.node_options if each.DESCRIPTOR.full_name == _PYTHON_OPTIONS), None)
    if options is None:
        fix = f'add node_options {{ [type.googleapis.com/{_PYTHON_OPTIONS}]: {{ handler_path: "model.py" }} }}'
        where = f'node "{node.canonical_name}" has no node_options that name its handler_path'
        findings.refuse(node.at, f"{NODE_OPTIONS_MISSING} - {where}", suggestion=fix)
        return
    file = handler_file(options.handler_path, directory)
    if not file.is_file():
        nearby = sorted(each.name for each in file.parent.glob("*.py")) if file.parent.is_dir() else []
        findings.refuse(
            Located(None, node.options_line or node.line, f"{node.at.path}.node_options[0]"),
            f'{HANDLER_MISSING} - handler_path of node "{node.canonical_name}"',
            expected="a Python file",
            found=str(file),
            suggestion=did_you_mean(file.name, nearby, otherwise=f"paths are relative to {directory}"),
        )
