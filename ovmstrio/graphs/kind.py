"""Graphs as the server knows them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import structlog
import trio

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import Findings, Located, check_members
from ovmstrio.config.graph_entries import GraphEntry, check_graph_settings, find_graph
from ovmstrio.config.service_options import check_python, read_python
from ovmstrio.config.specs import GraphSpec, PythonSpec, ServableSpec, TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.core.hooks import NULL_GRAPH_HOOKS
from ovmstrio.core.service import NOTHING_INSIDE
from ovmstrio.graphs.calculator import DefinitionScope
from ovmstrio.graphs.calculators import find_kind
from ovmstrio.graphs.calculators.text import HTTP_LLM, PAYLOADS, TEXT_CALCULATORS, read_node_options
from ovmstrio.graphs.graph_file import examine_text
from ovmstrio.graphs.plan import LoadedGraph, LoadedNode, close_nodes, make_graph_plan
from ovmstrio.graphs.servable import GraphServable
from ovmstrio.graphs.validate import examine_graph
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.serving.fingerprints import graph_mark, paths_mark
from ovmstrio.serving.kind import Dependency, Kind, Takes
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing
from ovmstrio.util.placement import run_load
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.hooks import GraphHooks
    from ovmstrio.core.service import Inside, LeaseServable, Service, TextApi
    from ovmstrio.graphs.calculator import CalculatorKind
    from ovmstrio.graphs.graph_config import GraphConfig, NodeConfig
    from ovmstrio.isolation.isolated_code import Isolation
    from ovmstrio.serving.kind import LoadContext

__all__ = [
    "GRAPHS",
    "GraphKind",
    "TextGraph",
    "load_graph",
    "paths_of_models",
    "read_graphs",
    "read_text_graph",
    "text_graph_of",
]

# ----------------------------------------------------------------------
# The graphs of a configuration file: those of its own list, and those among the models
# ----------------------------------------------------------------------

GRAPHS: Final = "mediapipe_config_list"


def read_graphs(file: ConfigFile) -> list[GraphSpec]:
    """Read every graph, and the models that belong to it, which take their names first."""
    checked = [replace(item, value=check_members(item, GraphEntry, file.findings)) for item in file.items(GRAPHS)]
    return [_read_graph(node, file) for node in _first_of_each_name([*file.models.graphs, *checked], file)]


def _first_of_each_name(nodes: Iterable[Located], file: ConfigFile) -> list[Located]:
    named = [node for node in nodes if "name" in node.value]  # of others it is told already that they are wrong
    return [node for node in named if file.is_first(GraphSpec.kind, node, node.find("name"))]


def _read_graph(node: Located, file: ConfigFile) -> GraphSpec:
    given = {key: member.plain() for key, member in node.value.items()}
    files = find_graph(given, file.directory)
    place = file.place(node)
    checked = [*check_graph_settings(given), *check_python(given, file.directory)]
    placed = [place.of(problem) for problem in checked]
    errors = [problem for problem in placed if problem.severity == "error"]
    file.findings.problems += [problem for problem in placed if problem.severity != "error"]
    if not errors:
        errors += file.subconfigs.read(files.subconfig)
    return GraphSpec(
        name=given["name"],
        origin=file.origin(node),
        problems=tuple(errors),
        place=place,
        python=PythonSpec() if errors else read_python(given, file.directory),
        **files._asdict(),
    )


# ----------------------------------------------------------------------
# Graphs as the server knows them
# ----------------------------------------------------------------------

_TEXT_MODEL: Final = re.compile(rb"\b(?:HttpLLM|Embeddings|Rerank|S2t|T2s|ImageGen)Calculator")
_READ_BY_ENGINES: Final = frozenset({".xml", ".bin", ".json", ".jinja", ".gguf"})
_MISSING: Final = Problem("the graph's file does not exist", path="graph_path")


class GraphKind(Kind[GraphSpec]):
    """Packet graphs, whose sessions look for what they call when it is called."""

    name = GraphSpec.kind
    spec = GraphSpec
    takes = frozenset({Takes.TENSORS, Takes.STREAMS, Takes.GENERATION, Takes.PAYLOADS})
    section = GRAPHS
    occupied = "Given mediapipe graph name is already occupied"

    def read(self, file: ConfigFile) -> list[ServableSpec]:
        """Read the graphs of the file; those that are one model of text become that."""
        return [_as_it_is_served(spec, file) for spec in read_graphs(file)]

    def depends_on(self, spec: GraphSpec) -> Sequence[Dependency]:
        """Give what the sessions of the graph's file call."""
        try:
            content = read_regular_bytes(spec.graph_path)
        except OSError:
            return ()
        return [call for call in _sessions(content, str(spec.graph_path)) if call.name != spec.name]

    def list_versions(self, spec: GraphSpec) -> Listing:
        """Give the one version there is."""
        return Listing({ONLY_VERSION: spec.graph_path.parent}, mark=self.files_mark(spec, spec.graph_path.parent))

    def files_mark(self, spec: GraphSpec, directory: Path) -> str:
        """Look at the graph's file, the code of its nodes, and the models of those that make text."""
        del directory
        return graph_mark(spec) + paths_mark(file for path in _models(spec) for file in _files_of_model(path))

    def examine(self, spec: GraphSpec) -> Sequence[Problem]:
        """Tell everything about the graph's file; it is told again when it keeps the graph from being loaded."""
        from ovmstrio.graphs.validate import examine_graph  # noqa: PLC0415 - as in `load`

        return examine_graph(spec.graph_path, spec.base_path).problems if spec.graph_path.is_file() else ()

    def place(self, spec: GraphSpec, problem: Problem, directory: Path | None) -> Problem:
        """Point at the graph's file, except for what the configuration says of it."""
        del directory
        if problem.file or problem.path == _MISSING.path:
            return spec.placed(problem)
        return replace(problem, file=str(spec.graph_path))

    async def load(self, spec: GraphSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Check the graph's file, and make what its nodes share."""
        # What only graphs need is left alone by those who have none.
        from ovmstrio.isolation.isolated_code import Isolation  # noqa: PLC0415 - as above

        del version, directory
        if not await trio.Path(spec.graph_path).is_file():
            raise ConfigError([replace(_MISSING, found=str(spec.graph_path))])
        return await load_graph(
            spec,
            lease=context.lease,
            tasks=context.tasks,
            hooks=context.meters.graph(spec.name),
            hide_errors=context.hide_errors,
            isolation=Isolation.of(
                spec.python, is_default=context.isolates_python, memory_limit=context.python_memory_limit
            ),
            load_text=partial(_load_text, context),
            text_api=context.text_api,
        )

    def obstacle(self, service: Service) -> str:
        """Tell of a node's engine that has ended, and is not there again yet."""
        told: str = getattr(service, "obstacle", "")
        return told

    def look_inside(self, spec: GraphSpec, service: Service) -> Inside:
        """Tell of the graph's nodes and streams."""
        from ovmstrio.graphs.servable import GraphServable  # noqa: PLC0415 - as in `load`

        del spec
        return service.inside if isinstance(service, GraphServable) else NOTHING_INSIDE


async def _load_text(context: LoadContext, spec: TextModelSpec) -> TextGenerator:
    """Load the model of a node that makes text.

    Raises:
        ConfigError, ServerError: as ``load_task``.
    """
    from ovmstrio.text.kind import load_task  # noqa: PLC0415 - as in `load`

    return cast("TextGenerator", await load_task(spec, context))


def _models(spec: GraphSpec) -> tuple[Path, ...]:
    """Give the files and folders of the models that the graph's nodes name, as far as they can be read; blocking."""
    try:
        content = read_regular_bytes(spec.graph_path)
    except OSError:
        return ()
    return _model_paths(content, spec.base_path) if _TEXT_MODEL.search(content) else ()


def _files_of_model(path: Path) -> Iterator[Path]:
    """Give the file of a model, or what engines read of its folder, where code of users may keep files of its own.

    A folder that cannot be read is a state like any other.
    """
    try:
        entries = list(path.iterdir())
    except (OSError, ValueError):
        yield path
        return
    yield from (file for file in entries if file.suffix in _READ_BY_ENGINES)


def text_graph_of(spec: GraphSpec, cache_dir: Path | None) -> TextGraph | None:
    """Give what a graph is served as that is one model of text; None for any other; blocking."""
    try:
        content = read_regular_bytes(spec.graph_path)
    except (OSError, ValueError):
        return None
    if not _TEXT_MODEL.search(content):
        return None

    return read_text_graph(spec, cache_dir)


def _as_it_is_served(spec: GraphSpec, file: ConfigFile) -> ServableSpec:
    found = text_graph_of(spec, file.cache_dir)
    if found is None:
        return spec.model_copy(update={"cache_dir": file.cache_dir})
    file.findings.problems += found.warnings
    # The configuration is read again when the graph's file changes.
    file.subconfigs.contents[spec.graph_path] = found.content
    return found.spec


@lru_cache(maxsize=64)
def _sessions(content: bytes, file: str) -> tuple[Dependency, ...]:
    """Find what is called in a graph's file; one that cannot be read calls nothing."""
    if b"servable_name" not in content:
        return ()
    from ovmstrio.graphs.calculators.inference import find_calls  # noqa: PLC0415 - as in `load`

    try:
        return tuple(find_calls(content.decode(), file))
    except (UnicodeDecodeError, ServerError):
        return ()


@lru_cache(maxsize=64)
def _model_paths(content: bytes, directory: Path) -> tuple[Path, ...]:
    """Find what nodes of a graph's file name that make text, drafts included; a file without sense names nothing."""
    return paths_of_models(content.decode(errors="replace"), directory)


# ----------------------------------------------------------------------
# Load a graph: read and check its file, then make what its nodes share
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Graphs that consist of one model of text, as OpenVINO Model Server writes them: they are served as that model
# ----------------------------------------------------------------------


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
