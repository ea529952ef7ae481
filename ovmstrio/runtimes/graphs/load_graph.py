"""Load a graph: read and check its file, then make what its nodes share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.hooks import NULL_GRAPH_HOOKS
from ovmstrio.runtimes.graphs.calculator import DefinitionScope
from ovmstrio.runtimes.graphs.calculators import find_kind
from ovmstrio.runtimes.graphs.examining import examine_graph
from ovmstrio.runtimes.graphs.graph_plan import LoadedGraph, LoadedNode, close_nodes, make_graph_plan
from ovmstrio.runtimes.graphs.graph_servable import GraphServable
from ovmstrio.work.placement import run_load
from ovmstrio.work.threads.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.config.specs import GraphSpec
    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.hooks import GraphHooks
    from ovmstrio.core.payloads import TextApi
    from ovmstrio.core.servable import LeaseServable
    from ovmstrio.runtimes.graphs.calculator import CalculatorKind
    from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, NodeConfig
    from ovmstrio.work.isolation.isolated_code import Isolation

__all__ = ["load_graph"]

log = structlog.get_logger(__name__)


async def load_graph(
    spec: GraphSpec,
    *,
    lease: LeaseServable,
    tasks: trio.Nursery,
    hooks: GraphHooks = NULL_GRAPH_HOOKS,
    hide_errors: bool = False,
    isolation: Isolation | None = None,
    load_text: Callable[[TextModelSpec], Awaitable[TextGenerator]] | None = None,
    text_api: Callable[[], TextApi] | None = None,
) -> GraphServable:
    """Load a graph; the caller owns the servable and closes it.

    Args:
        spec: how it was configured.
        lease: how nodes call what else is served.
        tasks: owns the graph's worker threads; must outlive the servable.
        hooks: are told of instances.
        hide_errors: tell clients only the type of what user code raises.
        isolation: how user code is run in processes of its own; None for threads.
        load_text: loads the models of nodes that make text; None where they cannot be loaded.
        text_api: makes what reads what these nodes are asked, and writes what they answer.

    Raises:
        ConfigError: the file cannot be used, or a node cannot be loaded; nodes that were are finalized.

    Cancellation: while nodes load; nodes that were loaded are finalized.
    """
    examined = await run_load(partial(examine_graph, spec.graph_path, spec.base_path))
    if examined.config is None or examined.errors:
        raise ConfigError(examined.errors)
    for problem in examined.problems:
        log.warning("graph", graph=spec.name, problem=str(problem))
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
    nodes: list[LoadedNode] = []
    try:
        await tasks.start(threads.run)
        for node in examined.config.nodes:
            kind = _kind_of(node)
            resources = await kind.load(node, scope)
            nodes.append(LoadedNode(node, kind.contract(node), resources, hooks.node(node.canonical_name)))
    except BaseException:
        with trio.CancelScope(shield=True):
            await close_nodes(nodes, threads)
        raise
    loaded = LoadedGraph(make_graph_plan(examined.config, nodes), threads, _server_side(examined.config))
    return GraphServable(spec.name, loaded, hooks)


def _kind_of(node: NodeConfig) -> CalculatorKind:
    kind = find_kind(node.calculator)
    if kind is None:
        raise ConfigError([Problem(f"unknown calculator {node.calculator!r}", line=node.line)])
    return kind


def _server_side(config: GraphConfig) -> dict[str, Any]:
    """Give the side packet that Python nodes ask for; what it stands for is the node's own here."""
    return {ref.name: None for node in config.nodes for ref in node.side_inputs if ref.name == "py"}
