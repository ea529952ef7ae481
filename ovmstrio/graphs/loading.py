"""Loading of graphs: calculators, side packets and the graph servable."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.config.specs import GraphSpec, TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.hooks import NULL_GRAPH_HOOKS
from ovmstrio.graphs.calculator import DefinitionScope
from ovmstrio.graphs.calculators import find_calculator
from ovmstrio.graphs.plan import LoadedGraph, LoadedNode, close_nodes, create_graph_plan
from ovmstrio.graphs.servable import GraphServable
from ovmstrio.graphs.validate import validate_graph
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.util.load_limit import run_load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.hooks import GraphHooks
    from ovmstrio.core.payloads import TextApiAdapter
    from ovmstrio.core.service import ServableLookup
    from ovmstrio.graphs.calculator import CalculatorKind
    from ovmstrio.graphs.graph_config import NodeConfig
    from ovmstrio.isolation.isolated_code import Isolation

log = structlog.get_logger(__name__)


async def load_graph(
    spec: GraphSpec,
    *,
    lease: ServableLookup,
    tasks: trio.Nursery,
    hooks: GraphHooks = NULL_GRAPH_HOOKS,
    hide_errors: bool = False,
    isolation: Isolation | None = None,
    load_text: Callable[[TextModelSpec], Awaitable[TextGenerator]] | None = None,
    text_api: Callable[[], TextApiAdapter] | None = None,
) -> GraphServable:
    """Load a graph; the caller owns the servable and closes it.

    After an error or cancellation, the nodes loaded so far are finalized.

    Args:
        spec: the graph's configuration.
        lease: gives nodes access to other servables.
        tasks: owns the graph's worker threads; must outlive the servable.
        hooks: observers of instances.
        hide_errors: send clients only the type of user exceptions.
        isolation: worker processes for user code; None for threads.
        load_text: loads the models of text-generation nodes; None if that is not possible.
        text_api: creates the request parser and response writer of text-generation nodes.

    Raises:
        ConfigError: the file is invalid, or a node cannot be loaded.
    """
    examined = await run_load(partial(validate_graph, spec.graph_path, spec.base_path))
    if examined.config is None or examined.errors:
        raise ConfigError(examined.errors)
    for problem in examined.problems:
        log.warning("graph problem found", graph=spec.name, problem=str(problem))
    threads = WorkerThreads()
    scope = DefinitionScope(
        spec.name,
        spec.base_path,
        threads,
        lease,
        hide_errors,
        isolation,
        tasks,
        load_text=load_text,
        text_api=text_api,
        cache_dir=spec.cache_dir,
    )
    nodes = await _load_nodes(examined.config.nodes, scope, hooks, tasks)
    # The side packet of Python nodes has no value, because each node holds its own state.
    side = {ref.name: None for node in examined.config.nodes for ref in node.side_inputs if ref.name == "py"}
    loaded = LoadedGraph(create_graph_plan(examined.config, nodes), threads, side)
    return GraphServable(spec.name, loaded, hooks)


async def _load_nodes(
    configs: Sequence[NodeConfig], scope: DefinitionScope, hooks: GraphHooks, tasks: trio.Nursery
) -> list[LoadedNode]:
    """Start the graph's worker threads and load its nodes; after an error, finalize the nodes loaded so far."""
    nodes: list[LoadedNode] = []
    try:
        await tasks.start(scope.threads.run)
        for node in configs:
            kind = _kind_of(node)
            resources = await kind.load(node, scope)
            nodes.append(LoadedNode(node, kind.contract(node), resources, hooks.node(node.canonical_name)))
    except BaseException:
        with trio.CancelScope(shield=True):
            await close_nodes(nodes, scope.threads)
        raise
    return nodes


def _kind_of(node: NodeConfig) -> CalculatorKind:
    kind = find_calculator(node.calculator)
    if kind is None:
        raise ConfigError([Problem(f"unknown calculator {node.calculator!r}", line=node.line)])
    return kind
