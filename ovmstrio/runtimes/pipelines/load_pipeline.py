"""Load a pipeline: open its custom nodes, look at what it calls, and see that everything fits together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.config.findings import did_you_mean
from ovmstrio.core.errors import ConfigError, NotFound, NotReady, Problem
from ovmstrio.core.hooks import NULL_METERS
from ovmstrio.core.servable import SequenceServable
from ovmstrio.runtimes.models.model import ModelServable
from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import CustomNode
from ovmstrio.runtimes.pipelines.custom_nodes.open_node import open_custom_node
from ovmstrio.runtimes.pipelines.node_calls import CustomNodeCall, NodeCall, ServableCall, TimedNodeCall
from ovmstrio.runtimes.pipelines.node_checks import check_entry, check_nodes
from ovmstrio.runtimes.pipelines.node_signatures import NodeSignature, signature_of_custom_node, signature_of_servable
from ovmstrio.runtimes.pipelines.pipeline_inside import look_inside
from ovmstrio.runtimes.pipelines.pipeline_metadata import describe_inputs, describe_outputs
from ovmstrio.runtimes.pipelines.pipeline_plan import make_plan
from ovmstrio.runtimes.pipelines.pipeline_problems import Code, placed, problem_of
from ovmstrio.runtimes.pipelines.pipeline_servable import DagServable
from ovmstrio.runtimes.pipelines.structure import examine_structure

if TYPE_CHECKING:
    from collections.abc import Collection

    from ovmstrio.config.specs import PipelineNode, PipelineSpec
    from ovmstrio.core.hooks import Meters
    from ovmstrio.core.servable import LeaseServable, Servable

__all__ = ["load_pipeline"]

OpenNode = Callable[[Path, str, Mapping[str, str]], Awaitable[CustomNode]]

log = structlog.get_logger(__name__)


async def load_pipeline(
    spec: PipelineSpec,
    *,
    lease: LeaseServable,
    tasks: trio.Nursery,
    meters: Meters = NULL_METERS,
    configured: Collection[str] = (),
    hide_errors: bool = False,
    is_isolated: bool = False,
) -> DagServable:
    """Load a pipeline; the caller owns the servable and closes it.

    Args:
        spec: how it was configured.
        lease: how nodes call what else is served; what they call must be there by now.
        tasks: hosts threads and processes of custom nodes; must outlive the servable.
        meters: tell of runs of the nodes.
        configured: names of what is served, one of which a node may mean that calls something else.
        hide_errors: tell clients only the type of what user code raises.
        is_isolated: whether shared libraries run in processes of their own.

    Raises:
        ConfigError: the nodes do not fit together, or one of them cannot be used; lists everything that is wrong.

    Cancellation: while custom nodes are opened and models waited for; nodes that were opened are closed.
    """
    structure, problems = examine_structure(spec)
    problems = [*spec.errors, *problems]
    if structure is None:
        raise ConfigError(problems)
    async with AsyncExitStack() as opened:
        open_node = partial(open_custom_node, tasks=tasks, hide_errors=hide_errors, is_isolated=is_isolated)
        nodes = _Nodes(spec, lease, open_node, opened, configured)
        for node in structure.nodes.values():
            await nodes.add(node)
        problems += nodes.problems + check_nodes(structure, nodes.signatures)
        inputs, ambiguous = describe_inputs(structure, nodes.signatures)
        problems += ambiguous + check_entry(structure, inputs)
        _raise_errors(spec.name, problems)
        outputs = describe_outputs(structure, nodes.signatures, inputs)
        calls = {name: TimedNodeCall(name, call, meters.node(spec.name, name)) for name, call in nodes.calls.items()}
        entry = make_plan(structure, calls)
        inside = look_inside(spec, entry, {name: call.tally for name, call in calls.items()})
        servable = DagServable(spec.name, entry, inputs, outputs, tuple(nodes.custom), inside=inside)
        opened.pop_all()
        return servable


def _raise_errors(name: str, problems: list[Problem]) -> None:
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    for problem in problems:
        log.warning("pipeline", pipeline=name, problem=str(problem))


class _Nodes:
    """What is found out of one node after the other."""

    def __init__(
        self,
        spec: PipelineSpec,
        lease: LeaseServable,
        open_node: OpenNode,
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
        self._others = [name for name in configured if name != spec.name]

    async def add(self, node: PipelineNode) -> None:
        """Note signature and call of a node, or what is wrong with it."""
        if node.model_name:
            await self._add_servable(node)
        elif node.library in self._spec.libraries:
            await self._add_custom(node, self._spec.libraries[node.library])

    async def _add_servable(self, node: PipelineNode) -> None:
        self.calls[node.name] = ServableCall(self._lease, node.name, node.model_name, node.version)
        if node.model_name == self._spec.name:
            return
        try:
            with await self._lease(node.model_name, str(node.version) if node.version else "") as lease:
                self.problems += _refuse(node, lease.servable)
                self.signatures[node.name] = signature_of_servable(lease.servable.metadata)
        except (NotFound, NotReady) as error:
            version = f" version {node.version}" if node.version else ""
            message = f"{node.model_name!r}{version} cannot be called: {error.message}"
            fix = "see why it is not loaded"
            if node.model_name not in self._others:
                known = f"configure it; known are {', '.join(self._others) or 'none'}"
                fix = did_you_mean(node.model_name, self._others, otherwise=known)
            self.problems.append(problem_of(node, Code.MODEL_MISSING, message, fix))

    async def _add_custom(self, node: PipelineNode, library: Path) -> None:
        try:
            opened = await self._open(library, node.name, node.params)
        except ConfigError as error:
            self.problems += [each if each.file else placed(node, each) for each in error.problems]
            return
        self._opened.push_async_callback(_close, opened)
        self.custom.append(opened)
        self.signatures[node.name] = signature_of_custom_node(opened)
        self.problems += _untyped(node, opened)
        wanted = {output.data_item: None for output in node.outputs}
        self.calls[node.name] = CustomNodeCall(node.name, opened, wanted)


async def _close(node: CustomNode) -> None:
    with trio.CancelScope(shield=True):
        await node.aclose()


def _refuse(node: PipelineNode, servable: Servable) -> list[Problem]:
    """Tell why a servable must not be part of a pipeline, if that is so."""
    if isinstance(servable, SequenceServable):
        message = f"{node.model_name!r} is stateful, and a pipeline has no sequences"
        return [problem_of(node, Code.MODEL_STATEFUL, message, "call it by itself, or serve it without state")]
    if isinstance(servable, ModelServable) and servable.follows_requests:
        message = f'the batch size or a shape of {node.model_name!r} is "auto"'
        return [problem_of(node, Code.MODEL_CHANGES, message, 'give it a range, such as "1:8", or "-1"')]
    return []


def _untyped(node: PipelineNode, opened: CustomNode) -> list[Problem]:
    """Find what a custom node says no known type of."""
    return [
        problem_of(node, Code.PRECISION, f"its {kind} {info.name!r} has no known precision", "mend the library")
        for kind, infos in (("input", opened.inputs), ("output", opened.outputs))
        for info in infos.values()
        if info.datatype is None
    ]
