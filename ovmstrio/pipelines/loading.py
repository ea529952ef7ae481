"""Loading of pipelines: custom nodes, checks and the pipeline servable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.specs import PipelineSpec
from ovmstrio.core.errors import ConfigError, NotFound, NotReady, Problem
from ovmstrio.core.hooks import NULL_METERS
from ovmstrio.core.service import Introspection, SequenceServable
from ovmstrio.models.servable import ModelServable
from ovmstrio.pipelines.custom_node import CustomNode
from ovmstrio.pipelines.node_calls import CustomNodeCall, MeasuredNodeCall, NodeCall, ServableCall
from ovmstrio.pipelines.open_node import open_custom_node
from ovmstrio.pipelines.plan import create_plan, draw_pipeline
from ovmstrio.pipelines.servable import PipelineServable
from ovmstrio.pipelines.signatures import (
    NodeSignature,
    check_entry,
    check_nodes,
    describe_inputs,
    describe_outputs,
    signature_of_custom_node,
    signature_of_servable,
)
from ovmstrio.pipelines.structure import EXIT, PipelineErrorCode, node_problem, validate_structure, with_node_location

if TYPE_CHECKING:
    from collections.abc import Collection

    from ovmstrio.config.specs import PipelineNode
    from ovmstrio.core.hooks import Meters
    from ovmstrio.core.service import NodeCounters, Servable, ServableLookup, StreamCounter
    from ovmstrio.pipelines.plan import NodePlan

log = structlog.get_logger(__name__)


_OpenNode = Callable[[Path, str, Mapping[str, str]], Awaitable[CustomNode]]


def look_inside(spec: PipelineSpec, entry: NodePlan, tallies: Mapping[str, NodeCounters]) -> Introspection:
    """Return the drawing of a pipeline with the counters of its nodes (by name) and connections."""
    drawing = draw_pipeline(spec)
    keys = {node.name: f"n{number}" for number, node in enumerate(spec.nodes)}
    targets = {key: name for name, key in keys.items()}
    outputs = {f"o{number}": given.name for number, given in enumerate(spec.outputs)}
    links = _links(entry)
    streams = {}
    for number, edge in enumerate(drawing.edges):
        is_exit = edge.target in outputs
        end = (EXIT, outputs[edge.target]) if is_exit else (targets[edge.target], edge.target_tag)
        if end in links:
            streams[number] = links[end]
    return Introspection(drawing, nodes={keys[name]: tally for name, tally in tallies.items()}, streams=streams)


def _links(entry: NodePlan) -> dict[tuple[str, str], StreamCounter]:
    found: dict[tuple[str, str], StreamCounter] = {}
    seen, waiting = {entry.name}, [entry]
    while waiting:
        node = waiting.pop()
        for link in node.links:
            found[link.target.name, link.name] = link.tally
            if link.target.name not in seen:
                seen.add(link.target.name)
                waiting.append(link.target)
    return found


async def load_pipeline(
    spec: PipelineSpec,
    *,
    lease: ServableLookup,
    tasks: trio.Nursery,
    meters: Meters = NULL_METERS,
    configured: Collection[str] = (),
    hide_errors: bool = False,
    is_isolated: bool = False,
) -> PipelineServable:
    """Load a pipeline; the caller owns the servable and closes it.

    After an error, the custom nodes opened so far are closed.

    Args:
        spec: the pipeline's configuration.
        lease: gives nodes access to other servables, which must be loaded.
        tasks: runs threads and processes of custom nodes; must outlive the servable.
        meters: observers of node runs.
        configured: names of all services, for hints.
        hide_errors: send clients only the type of user exceptions.
        is_isolated: run shared libraries in worker processes.

    Raises:
        ConfigError: the nodes do not fit together, or a node cannot be used; lists all problems.
    """
    structure, problems = validate_structure(spec)
    problems = [*spec.errors, *problems]
    if structure is None:
        raise ConfigError(problems)
    async with AsyncExitStack() as opened:
        open_node = partial(open_custom_node, tasks=tasks, hide_errors=hide_errors, is_isolated=is_isolated)
        nodes = _NodeCollector(spec, lease, open_node, opened, configured)
        for node in structure.nodes.values():
            await nodes.add(node, {edge.item for edge in structure.edges_from(node.name)})
        problems += nodes.problems + check_nodes(structure, nodes.signatures)
        inputs, ambiguous = describe_inputs(structure, nodes.signatures)
        problems += ambiguous + check_entry(structure, inputs)
        _raise_errors(spec.name, problems)
        outputs = describe_outputs(structure, nodes.signatures, inputs)
        calls = {name: MeasuredNodeCall(name, call, meters.node(spec.name, name)) for name, call in nodes.calls.items()}
        entry = create_plan(structure, calls)
        inside = look_inside(spec, entry, {name: call.tally for name, call in calls.items()})
        servable = PipelineServable(spec.name, entry, inputs, outputs, tuple(nodes.custom), inside=inside)
        opened.pop_all()
        return servable


def _raise_errors(name: str, problems: list[Problem]) -> None:
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    for problem in problems:
        log.warning("pipeline problem found", pipeline=name, problem=str(problem))


async def _close(node: CustomNode) -> None:
    with trio.CancelScope(shield=True):
        await node.aclose()


class _NodeCollector:
    """Signatures, calls and problems of the nodes, collected one by one."""

    def __init__(
        self,
        spec: PipelineSpec,
        lease: ServableLookup,
        open_node: _OpenNode,
        opened: AsyncExitStack,
        configured: Collection[str],
    ) -> None:
        self.signatures: dict[str, NodeSignature] = {}
        self.calls: dict[str, NodeCall] = {}
        self.custom: list[CustomNode] = []
        self.problems: list[Problem] = []
        self._spec = spec
        self._lease = lease
        self._open = open_node
        self._opened = opened
        self._other_names = [name for name in configured if name != spec.name]

    async def add(self, node: PipelineNode, used_outputs: Collection[str]) -> None:
        if node.model_name:
            await self._add_servable(node)
        elif node.library in self._spec.libraries:
            await self._add_custom(node, self._spec.libraries[node.library], used_outputs)

    async def _add_servable(self, node: PipelineNode) -> None:
        self.calls[node.name] = ServableCall(self._lease, node.name, node.model_name, node.version)
        if node.model_name == self._spec.name:
            return
        try:
            with await self._lease(node.model_name, str(node.version) if node.version else "") as lease:
                self.problems += _check_servable(node, lease.servable)
                self.signatures[node.name] = signature_of_servable(lease.servable.metadata)
        except (NotFound, NotReady) as error:
            version = f" version {node.version}" if node.version else ""
            message = f"{node.model_name!r}{version} cannot be called: {error.message}"
            fix = "check why it is not loaded"
            if node.model_name not in self._other_names:
                known = f"configure it; known: {', '.join(self._other_names) or 'none'}"
                fix = did_you_mean(node.model_name, self._other_names, otherwise=known)
            self.problems.append(node_problem(node, PipelineErrorCode.MODEL_MISSING, message, fix))

    async def _add_custom(self, node: PipelineNode, library: Path, used_outputs: Collection[str]) -> None:
        try:
            opened = await self._open(library, node.name, node.params)
        except ConfigError as error:
            self.problems += [each if each.file else with_node_location(node, each) for each in error.problems]
            return
        self._opened.push_async_callback(_close, opened)
        self.custom.append(opened)
        self.signatures[node.name] = signature_of_custom_node(opened)
        self.problems += _check_precisions(node, opened)
        self.calls[node.name] = CustomNodeCall(node.name, opened, sorted(used_outputs))


def _check_servable(node: PipelineNode, servable: Servable) -> list[Problem]:
    if isinstance(servable, SequenceServable):
        message = f"{node.model_name!r} is stateful, but pipelines have no sequences"
        return [
            node_problem(node, PipelineErrorCode.MODEL_STATEFUL, message, "call it directly, or serve it without state")
        ]
    if isinstance(servable, ModelServable) and servable.follows_requests:
        message = f'the batch size or a shape of {node.model_name!r} is "auto"'
        return [node_problem(node, PipelineErrorCode.MODEL_CHANGES, message, 'give it a range, such as "1:8", or "-1"')]
    return []


def _check_precisions(node: PipelineNode, opened: CustomNode) -> list[Problem]:
    return [
        node_problem(
            node, PipelineErrorCode.PRECISION, f"its {kind} {info.name!r} has no known precision", "fix the library"
        )
        for kind, infos in (("input", opened.inputs), ("output", opened.outputs))
        for info in infos.values()
        if info.datatype is None
    ]
