"""Structure of a pipeline's configuration, and its problems.

A demultiplexer splits its outputs into *shards*; the nodes after it run once per shard, until a node gathers them. The
demultiplexers around a node, outermost first, are its *level*. Entry and exit are nodes named ``request`` and
``response``; the exit gathers everything that is still split.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Final

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.specs import NodeOutput, PipelineNode, PipelineSpec
from ovmstrio.core.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ovmstrio.config.specs import NodeInput

# ----------------------------------------------------------------------
# Structure of a pipeline's configuration, and its problems
# ----------------------------------------------------------------------

# Problems, by OVMS's codes


class PipelineErrorCode(StrEnum):
    """OVMS's code of a problem."""

    CYCLE = "PIPELINE_CYCLE_FOUND"
    UNCONNECTED = "PIPELINE_CONTAINS_UNCONNECTED_NODES"
    ENTRIES = "PIPELINE_MULTIPLE_ENTRY_NODES"
    EXITS = "PIPELINE_MULTIPLE_EXIT_NODES"
    DUPLICATE_NAME = "PIPELINE_NODE_NAME_DUPLICATE"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
    GATHER_MISSING = "PIPELINE_NODE_GATHER_FROM_NOT_EXISTING_NODE"
    GATHER_NO_DEMULTIPLEXER = "PIPELINE_NODE_GATHER_FROM_NOT_DEMULTIPLEXER"
    ORDER = "PIPELINE_WRONG_DEMULTIPLEXER_GATHER_NODES_ORDER"
    NODE_MISSING = "PIPELINE_NODE_REFERING_TO_MISSING_NODE"
    EXIT_USED = "PIPELINE_EXIT_USED_AS_NODE_DEPENDENCY"
    SOURCE_MISSING = "PIPELINE_NODE_REFERING_TO_MISSING_DATA_SOURCE"
    MULTIPLE_CONNECTIONS = "PIPELINE_MODEL_INPUT_CONNECTED_TO_MULTIPLE_DATA_SOURCES"
    MODEL_MISSING = "PIPELINE_NODE_REFERING_TO_MISSING_MODEL"
    MODEL_CHANGES = "FORBIDDEN_MODEL_DYNAMIC_PARAMETER"
    MODEL_STATEFUL = "REQUESTED_STATEFUL_PARAMETERS_ON_SUBSCRIBED_MODEL"
    STRING_DEMULTIPLICATION = "PIPELINE_STRING_DEMUILTIPLICATION_UNSUPPORTED"
    TOO_FEW_DIMENSIONS = "PIPELINE_NOT_ENOUGH_SHAPE_DIMENSIONS_TO_DEMULTIPLY"
    COUNT = "PIPELINE_DEMULTIPLY_COUNT_DOES_NOT_MATCH_TENSOR_SHARD_COUNT"
    INPUT_MISSING = "PIPELINE_CONNECTION_TO_MISSING_MODEL_INPUT"
    OUTPUT_MISSING = "PIPELINE_NODE_REFERING_TO_MISSING_MODEL_OUTPUT"
    SHAPE = "INVALID_SHAPE"
    PRECISION = "INVALID_PRECISION"
    NOT_CONNECTED = "PIPELINE_NOT_ALL_INPUTS_CONNECTED"
    AMBIGUOUS = "PIPELINE_INPUTS_AMBIGUOUS_METADATA"
    SELF = "PIPELINE_CALLS_ITSELF"


def node_problem(
    node: PipelineNode, code: PipelineErrorCode, message: str, fix: str, *, warning: bool = False
) -> Problem:
    """Return a problem of a node with the node's position."""
    problem = Problem(
        f"{code}: node {node.name!r}: {message}",
        suggestion=fix,
        severity="warning" if warning else "error",
    )
    return with_node_location(node, problem)


def with_node_location(node: PipelineNode, problem: Problem) -> Problem:
    """Add a node's position to a problem."""
    file, _, line = node.origin.rpartition(":")
    if not file or not line.isdecimal():
        return replace(problem, file=node.origin)
    return replace(problem, file=file, line=int(line))


# Structure

ENTRY: Final = "request"
EXIT: Final = "response"
DYNAMIC: Final = -1
"""The ``demultiply_count`` that splits a dimension of any size."""

Level = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """A connection: output ``item`` of ``source`` becomes input ``name`` of ``target``.

    ``item`` is the output's real name, not its alias; ``gathers`` are the demultiplexers gathered on the connection,
    innermost first.
    """

    source: str
    item: str
    target: str
    name: str
    gathers: Level = ()


@dataclass(frozen=True, slots=True)
class Structure:
    """Nodes in topological order with entry and exit, their connections, and the level of each node."""

    nodes: dict[str, PipelineNode]
    edges: tuple[Edge, ...]
    levels: dict[str, Level]

    def into(self, node: str) -> list[Edge]:
        """Return the connections to a node, in configuration order."""
        return [edge for edge in self.edges if edge.target == node]

    def edges_from(self, node: str) -> list[Edge]:
        """Return the connections from a node."""
        return [edge for edge in self.edges if edge.source == node]


def validate_structure(spec: PipelineSpec) -> tuple[Structure | None, list[Problem]]:
    """Return the structure of a pipeline (None if it has a cycle) and all problems."""
    nodes, problems = _name_nodes(spec)
    message = f"it calls {spec.name!r}, which is the pipeline itself"
    self_calls = [node for node in spec.nodes if node.model_name == spec.name]
    problems += [node_problem(node, PipelineErrorCode.SELF, message, "name a model") for node in self_calls]
    problems += _check_demultiplexers(nodes)
    edges, wrong = _connect(nodes)
    problems += wrong
    order = _order(nodes, edges)
    if isinstance(order, CycleError):
        names = " -> ".join(order.args[1])
        first, message = nodes[order.args[1][0]], f"the nodes form a cycle: {names}"
        return None, [
            *problems,
            node_problem(first, PipelineErrorCode.CYCLE, message, "remove one of these connections"),
        ]
    problems += _find_unused_nodes(nodes, edges)
    if not wrong:
        problems += _find_unused_inputs(nodes[ENTRY], edges)
    levels, edges, wrong = _assign_levels(order, nodes, edges)
    return Structure({name: nodes[name] for name in order}, tuple(edges), levels), problems + wrong


def examine_pipeline(spec: PipelineSpec, configured: Collection[str]) -> list[Problem]:
    """Return the problems of a pipeline's settings, structure and model names."""
    _, problems = validate_structure(spec)
    others = [name for name in configured if name != spec.name]
    for node in spec.nodes:
        if node.model_name and node.model_name not in configured:
            message = f"no model {node.model_name!r} is configured"
            hint = did_you_mean(node.model_name, others, otherwise=f"known: {', '.join(others) or 'none'}")
            problems.append(node_problem(node, PipelineErrorCode.MODEL_MISSING, message, hint))
    return [*spec.problems, *problems]


def _output_level(node: PipelineNode, level: Level) -> Level:
    return level if node.demultiply_count is None else (*level, node.name)


def _name_nodes(spec: PipelineSpec) -> tuple[dict[str, PipelineNode], list[Problem]]:
    entry = PipelineNode(
        name=ENTRY,
        outputs=tuple(NodeOutput(data_item=name, alias=name) for name in spec.inputs),
        demultiply_count=spec.demultiply_count,
        origin=spec.origin,
    )
    nodes = {ENTRY: entry}
    problems = []
    for node in spec.nodes:
        if node.name == EXIT:
            message = f"{EXIT!r} is reserved for the pipeline's outputs"
            problems.append(node_problem(node, PipelineErrorCode.EXITS, message, "rename the node"))
        elif node.name == ENTRY:
            message = f"{ENTRY!r} is reserved for the pipeline's inputs"
            problems.append(node_problem(node, PipelineErrorCode.ENTRIES, message, "rename the node"))
        elif node.name in nodes:
            message = f"duplicate node name {node.name!r}"
            problems.append(
                node_problem(node, PipelineErrorCode.DUPLICATE_NAME, message, "give each node a unique name")
            )
        else:
            nodes[node.name] = node
    nodes[EXIT] = PipelineNode(name=EXIT, inputs=spec.outputs, origin=spec.origin)
    return nodes, problems


def _check_demultiplexers(nodes: Mapping[str, PipelineNode]) -> list[Problem]:
    found = [node for node in nodes.values() if node.demultiply_count is not None]
    dynamic = [node for node in found if node.demultiply_count == DYNAMIC]
    problems = []
    if dynamic and len(found) > 1:
        names = ", ".join(repr(node.name) for node in found)
        message = f"a demultiplexer with a dynamic count must be the only demultiplexer, found: {names}"
        problems.append(
            node_problem(dynamic[0], PipelineErrorCode.NOT_IMPLEMENTED, message, "give each a demultiply_count above 0")
        )
    for node in nodes.values():
        source = node.gather_from_node
        if source is None:
            continue
        if source not in nodes or source == EXIT:
            hint = did_you_mean(source, [each.name for each in found], otherwise="name a node that demultiplexes")
            problems.append(
                node_problem(
                    node, PipelineErrorCode.GATHER_MISSING, f"it gathers from the unknown node {source!r}", hint
                )
            )
        elif nodes[source].demultiply_count is None:
            message = f"it gathers from {source!r}, which has no demultiply_count"
            problems.append(
                node_problem(node, PipelineErrorCode.GATHER_NO_DEMULTIPLEXER, message, "remove gather_from_node")
            )
    return problems


def _connect(nodes: Mapping[str, PipelineNode]) -> tuple[list[Edge], list[Problem]]:
    """Return the connections with resolved aliases; unresolved ones are reported and left out."""
    edges: list[Edge] = []
    problems: list[Problem] = []
    for node in nodes.values():
        counted = Counter(given.name for given in node.inputs)
        for given in node.inputs:
            found = _find_source(node, given, nodes)
            if isinstance(found, str):
                edges.append(Edge(given.node, found, node.name, given.name))
            else:
                problems.append(found)
        for name in [name for name, count in counted.items() if count > 1]:
            message = f"the input {name!r} is connected {counted[name]} times"
            problems.append(node_problem(node, PipelineErrorCode.MULTIPLE_CONNECTIONS, message, "keep one connection"))
    return edges, problems


def _find_source(node: PipelineNode, given: NodeInput, nodes: Mapping[str, PipelineNode]) -> str | Problem:
    what = f"the output {given.name!r}" if node.name == EXIT else f"the input {given.name!r}"
    source = nodes.get(given.node)
    if given.node == EXIT:
        return node_problem(
            node, PipelineErrorCode.EXIT_USED, f"{what} comes from {EXIT!r}, which has no outputs", "name a node"
        )
    if source is None:
        hint = did_you_mean(given.node, [name for name in nodes if name not in (EXIT, node.name)])
        return node_problem(
            node, PipelineErrorCode.NODE_MISSING, f"{what} comes from the unknown node {given.node!r}", hint
        )
    for output in source.outputs:
        if output.alias == given.data_item:
            return output.data_item
    known = [output.alias for output in source.outputs]
    items = "an input of the pipeline" if given.node == ENTRY else f"an alias among the outputs of {given.node!r}"
    hint = did_you_mean(given.data_item, known, otherwise=f"known: {', '.join(known) or 'none'}")
    message = f"{what} comes from {given.data_item!r}, which is not {items}"
    return node_problem(node, PipelineErrorCode.SOURCE_MISSING, message, hint)


def _order(nodes: Mapping[str, PipelineNode], edges: Iterable[Edge]) -> list[str] | CycleError:
    needs: dict[str, list[str]] = {name: [] for name in nodes}
    for edge in edges:
        needs[edge.target].append(edge.source)
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        return error


def _find_unused_nodes(nodes: Mapping[str, PipelineNode], edges: Iterable[Edge]) -> list[Problem]:
    sources: dict[str, set[str]] = {}
    for edge in edges:
        sources.setdefault(edge.target, set()).add(edge.source)
    needed, found = {EXIT, ENTRY}, [EXIT]
    while found:
        new = sources.get(found.pop(), set()) - needed
        needed |= new
        found += new
    hint = "connect one of its outputs to a node, or to an output of the pipeline, or remove it"
    return [
        node_problem(node, PipelineErrorCode.UNCONNECTED, "none of its outputs is used", hint)
        for node in nodes.values()
        if node.name not in needed
    ]


def _find_unused_inputs(entry: PipelineNode, edges: Iterable[Edge]) -> list[Problem]:
    used = {edge.item for edge in edges if edge.source == ENTRY}
    hint = "connect it to a node, or remove it: clients must send it anyway"
    return [
        node_problem(
            entry, PipelineErrorCode.UNCONNECTED, f"the input {output.alias!r} is not used", hint, warning=True
        )
        for output in entry.outputs
        if output.data_item not in used
    ]


def _assign_levels(
    order: Iterable[str], nodes: Mapping[str, PipelineNode], edges: Iterable[Edge]
) -> tuple[dict[str, Level], list[Edge], list[Problem]]:
    """Return the level of each node, and the edges with the demultiplexers they gather."""
    levels: dict[str, Level] = {}
    by_target: dict[str, list[Edge]] = {}
    for edge in edges:
        by_target.setdefault(edge.target, []).append(edge)
    gathering: list[Edge] = []
    problems: list[Problem] = []
    for name in order:
        into = by_target.get(name, [])
        sources = [_output_level(nodes[edge.source], levels[edge.source]) for edge in into]
        gathers = [_gathers_of(nodes[name], level) for level in sources]
        remaining = {level[: len(level) - len(given)] for level, given in zip(sources, gathers, strict=True)}
        problems += _check_levels(nodes[name], remaining, any(gathers))
        levels[name] = max(remaining, key=len, default=())
        gathering += [
            Edge(edge.source, edge.item, name, edge.name, given) for edge, given in zip(into, gathers, strict=True)
        ]
    return levels, gathering, problems


def _gathers_of(node: PipelineNode, level: Level) -> Level:
    """Return the demultiplexers of a level that a node gathers, innermost first."""
    if node.name == EXIT:
        return level[::-1]
    return (level[-1],) if level and level[-1] == node.gather_from_node else ()


def _check_levels(node: PipelineNode, levels: set[Level], gathers: bool) -> list[Problem]:
    problems = []
    if len(levels) > 1:
        shown = " and ".join(sorted(" in ".join(map(repr, level[::-1])) or "nothing" for level in levels))
        message = f"its inputs are split by different demultiplexers: {shown}"
        problems.append(
            node_problem(node, PipelineErrorCode.ORDER, message, "gather split inputs, or connect equally split inputs")
        )
    source = node.gather_from_node
    if source is not None and not gathers:
        deeper = any(source in level for level in levels)
        message = f"it gathers from {source!r}, " + (
            "which is not the innermost demultiplexer before it" if deeper else "which has no connection to it"
        )
        problems.append(
            node_problem(node, PipelineErrorCode.ORDER, message, "gather the innermost demultiplexer first")
        )
    return problems
