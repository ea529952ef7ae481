"""Pipelines of models and custom nodes as the server knows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.pipeline_entries import NODE_LIBRARIES, PIPELINES, read_pipelines
from ovmstrio.config.specs import PipelineSpec
from ovmstrio.core.errors import ConfigError, NotFound, NotReady, Problem
from ovmstrio.core.hooks import NULL_METERS
from ovmstrio.core.service import NOTHING_INSIDE, Inside, SequenceServable
from ovmstrio.models.servable import ModelServable
from ovmstrio.pipelines.custom_node import CustomNode
from ovmstrio.pipelines.open_node import open_custom_node
from ovmstrio.pipelines.plan import draw, make_plan
from ovmstrio.pipelines.run import CustomNodeCall, NodeCall, ServableCall, TimedNodeCall
from ovmstrio.pipelines.servable import DagServable
from ovmstrio.pipelines.signatures import (
    NodeSignature,
    check_entry,
    check_nodes,
    describe_inputs,
    describe_outputs,
    signature_of_custom_node,
    signature_of_servable,
)
from ovmstrio.pipelines.structure import EXIT, Code, examine_structure, placed, problem_of
from ovmstrio.serving.fingerprints import paths_mark, python_files
from ovmstrio.serving.kind import Dependency, Kind, Takes
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.config.specs import PipelineNode
    from ovmstrio.core.hooks import Meters
    from ovmstrio.core.service import LeaseServable, NodeTally, Servable, Service, StreamTally
    from ovmstrio.pipelines.plan import NodePlan
    from ovmstrio.serving.kind import LoadContext

__all__ = ["PipelineKind", "examine_pipeline", "load_pipeline", "look_inside", "pipeline_mark"]

# ----------------------------------------------------------------------
# What a loaded pipeline shows of itself: its picture, and what was counted at each part of it
# ----------------------------------------------------------------------


def look_inside(spec: PipelineSpec, entry: NodePlan, tallies: Mapping[str, NodeTally]) -> Inside:
    """Join the picture of a pipeline with what its nodes, by their names, and the connections from its entry count."""
    drawing = draw(spec)
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
    return Inside(drawing, nodes={keys[name]: tally for name, tally in tallies.items()}, streams=streams)


def _links(entry: NodePlan) -> dict[tuple[str, str], StreamTally]:
    """Give what counts at each connection, by where it ends."""
    found: dict[tuple[str, str], StreamTally] = {}
    seen, waiting = {entry.name}, [entry]
    while waiting:
        node = waiting.pop()
        for link in node.links:
            found[link.target.name, link.name] = link.tally
            if link.target.name not in seen:
                seen.add(link.target.name)
                waiting.append(link.target)
    return found


# ----------------------------------------------------------------------
# Load a pipeline: open its custom nodes, look at what it calls, and see that everything fits together
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# What can be said of a pipeline without anything that it calls
# ----------------------------------------------------------------------


def examine_pipeline(spec: PipelineSpec, configured: Collection[str]) -> list[Problem]:
    """Find what is wrong with a pipeline's settings, its structure, and the names of the models that it calls."""
    _, problems = examine_structure(spec)
    others = [name for name in configured if name != spec.name]
    for node in spec.nodes:
        if node.model_name and node.model_name not in configured:
            message = f"no model {node.model_name!r} is configured"
            hint = did_you_mean(node.model_name, others, otherwise=f"known are {', '.join(others) or 'none'}")
            problems.append(problem_of(node, Code.MODEL_MISSING, message, hint))
    return [*spec.problems, *problems]


# ----------------------------------------------------------------------
# Marks by which a change of what a pipeline is loaded from is seen: the libraries of its custom nodes
# ----------------------------------------------------------------------

_PYTHON: Final = ".py"


def pipeline_mark(spec: PipelineSpec) -> str:
    """Give a mark of the libraries' files that changes when one is written, appears or goes.

    With a Python file, the others of its directory count as well.  Libraries that are built in have no files.  What
    cannot be read is a state like any other.
    """
    return paths_mark(file for library in spec.libraries.values() for file in _files(library))


def _files(library: Path) -> set[Path]:
    if not library.is_absolute():
        return set()
    return {library, *python_files(library.parent)} if library.suffix == _PYTHON else {library}


# ----------------------------------------------------------------------
# Pipelines of models and custom nodes as the server knows them
# ----------------------------------------------------------------------


class PipelineKind(Kind[PipelineSpec]):
    """DAGs, which look at what they call when they are loaded."""

    name = PipelineSpec.kind
    spec = PipelineSpec
    takes = frozenset({Takes.TENSORS})
    section = PIPELINES
    further_sections = (NODE_LIBRARIES,)
    tells_all = True
    occupied = "Pipeline has the same name as model"

    def read(self, file: ConfigFile) -> list[PipelineSpec]:
        """Read the pipelines of the file."""
        return read_pipelines(file)

    def depends_on(self, spec: PipelineSpec) -> Sequence[Dependency]:
        """Give what the nodes call."""
        called = sorted({(node.model_name, node.version) for node in spec.nodes if node.model_name})
        return [
            Dependency(name, str(version) if version else "", reloads=True)
            for name, version in called
            if name != spec.name
        ]

    def list_versions(self, spec: PipelineSpec) -> Listing:
        """Give the one version there is."""
        return Listing({ONLY_VERSION: spec.base_path}, mark=pipeline_mark(spec))

    def files_mark(self, spec: PipelineSpec, directory: Path) -> str:
        """Look at the libraries of custom nodes."""
        del directory
        return pipeline_mark(spec)

    def examine(self, spec: PipelineSpec) -> Sequence[Problem]:
        """Tell everything about how the nodes are joined; errors are told again when they keep it from being loaded."""
        from ovmstrio.pipelines.structure import examine_structure  # noqa: PLC0415 - as in `load`

        return examine_structure(spec)[1]

    async def load(self, spec: PipelineSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Open the custom nodes, and see that everything fits together."""
        # What only pipelines need is left alone by those who have none.

        del version, directory
        return await load_pipeline(
            spec,
            lease=context.lease,
            tasks=context.tasks,
            meters=context.meters,
            configured=context.names,
            hide_errors=context.hide_errors,
            is_isolated=context.isolates_nodes,
        )

    def look_inside(self, spec: PipelineSpec, service: Service) -> Inside:
        """Tell of the pipeline's nodes and connections."""
        from ovmstrio.pipelines.servable import DagServable  # noqa: PLC0415 - as in `load`

        del spec
        return service.inside if isinstance(service, DagServable) else NOTHING_INSIDE
