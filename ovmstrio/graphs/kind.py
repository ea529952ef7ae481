"""The graph kind: configuration, loading, and graphs that consist of one text model."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, cast

import trio

from ovmstrio.config.config_file import ConfigFile
from ovmstrio.config.documents import Located
from ovmstrio.config.model_entries import GraphEntry, check_graph_settings, find_graph
from ovmstrio.config.schema import check_members
from ovmstrio.config.service_options import check_python, parse_python
from ovmstrio.config.specs import GraphSpec, PythonSpec, ServableSpec, TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.core.service import NO_INTROSPECTION
from ovmstrio.serving.fingerprints import graph_fingerprint, paths_fingerprint
from ovmstrio.serving.kind import CallType, Dependency, Kind
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing
from ovmstrio.util.regular_files import is_file, is_shortage, read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.service import Introspection, Service
    from ovmstrio.graphs.text_graphs import TextGraph
    from ovmstrio.serving.kind import LoadContext

# Configuration

_SECTION: Final = "mediapipe_config_list"


def _read_graphs(file: ConfigFile) -> list[GraphSpec]:
    """Parse every graph of a configuration file, including graphs in the model list, which claim their names first."""
    checked = [replace(item, value=check_members(item, GraphEntry, file.findings)) for item in file.items(_SECTION)]
    # A missing name is reported already.
    named = [node for node in (*file.models.graphs, *checked) if "name" in node.value]
    first = [node for node in named if file.is_first(GraphSpec.kind, node, node.find("name"))]
    return [_read_graph(node, file) for node in first]


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
        python=PythonSpec() if errors else parse_python(given, file.directory),
        **files._asdict(),
    )


# Kind

_TEXT_MODEL: Final = re.compile(rb"\b(?:HttpLLM|Embeddings|Rerank|S2t|T2s|ImageGen)Calculator")
_ENGINE_FILE_SUFFIXES: Final = frozenset({".xml", ".bin", ".json", ".jinja", ".gguf"})
_MISSING: Final = Problem("the graph's file does not exist", path="graph_path")


class GraphKind(Kind[GraphSpec]):
    """Packet graphs. Sessions in a graph look up the servable they call at call time."""

    name = GraphSpec.kind
    spec = GraphSpec
    call_types = frozenset({CallType.TENSORS, CallType.STREAMS, CallType.GENERATION, CallType.PAYLOADS})
    section = _SECTION
    occupied = "Given mediapipe graph name is already occupied"

    def read(self, file: ConfigFile) -> list[ServableSpec]:
        """Parse the graphs of a configuration file; a graph of one text model becomes a text model."""
        return [_served_spec(spec, file) for spec in _read_graphs(file)]

    def depends_on(self, spec: GraphSpec) -> Sequence[Dependency]:
        """Return the servables that the graph's sessions call."""
        try:
            content = read_regular_bytes(spec.graph_path)
        except OSError as error:
            if is_shortage(error):
                raise
            return ()
        return [call for call in _session_calls(content, str(spec.graph_path)) if call.name != spec.name]

    def list_versions(self, spec: GraphSpec) -> Listing:
        """Return the only version."""
        return Listing(
            {ONLY_VERSION: spec.graph_path.parent}, fingerprint=self.fingerprint(spec, spec.graph_path.parent)
        )

    def fingerprint(self, spec: GraphSpec, directory: Path) -> str:
        """Return the fingerprint of the graph file, the code of its nodes and the models of its text nodes."""
        del directory
        return graph_fingerprint(spec) + paths_fingerprint(
            file for path in _model_paths_of(spec) for file in _engine_files(path)
        )

    def examine(self, spec: GraphSpec) -> Sequence[Problem]:
        """Return all problems of the graph file."""
        from ovmstrio.graphs.validate import examine_graph  # noqa: PLC0415 - imported when first needed

        return examine_graph(spec.graph_path, spec.base_path).problems if is_file(spec.graph_path) else ()

    def place(self, spec: GraphSpec, problem: Problem, directory: Path | None) -> Problem:
        """Add the graph file to a problem, unless the problem is in the configuration."""
        del directory
        if problem.file or problem.path == _MISSING.path:
            return spec.placed(problem)
        return replace(problem, file=str(spec.graph_path))

    async def load(self, spec: GraphSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Load the graph."""
        from ovmstrio.graphs.loading import load_graph  # noqa: PLC0415 - imported when first needed

        # Imported here so that servers without graphs do not load it.
        from ovmstrio.isolation.isolated_code import Isolation  # noqa: PLC0415 - as above

        del version, directory
        if not await trio.to_thread.run_sync(is_file, spec.graph_path):
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

    def unready_reason(self, service: Service) -> str:
        """Return the reason why a node's engine is not ready."""
        reason: str = getattr(service, "unready_reason", "")
        return reason

    def look_inside(self, spec: GraphSpec, service: Service) -> Introspection:
        """Return the graph's nodes and streams."""
        from ovmstrio.graphs.servable import GraphServable  # noqa: PLC0415 - imported when first needed

        del spec
        return service.inside if isinstance(service, GraphServable) else NO_INTROSPECTION


async def _load_text(context: LoadContext, spec: TextModelSpec) -> TextGenerator:
    from ovmstrio.text.kind import load_task  # noqa: PLC0415 - as in `load`

    return cast("TextGenerator", await load_task(spec, context))


def _model_paths_of(spec: GraphSpec) -> tuple[Path, ...]:
    """Return the models that the graph's nodes name, as far as the file can be parsed. Reads the disk."""
    try:
        content = read_regular_bytes(spec.graph_path)
    except OSError as error:
        if is_shortage(error):
            raise
        return ()
    return _model_paths(content, spec.base_path) if _TEXT_MODEL.search(content) else ()


def _engine_files(path: Path) -> Iterator[Path]:
    """Yield the model file, or the files of its folder that engines read; user code may keep other files there.

    An unreadable folder yields the path itself.
    """
    try:
        entries = list(path.iterdir())
    except (OSError, ValueError) as error:
        if is_shortage(error):
            raise
        yield path
        return
    yield from (file for file in entries if file.suffix in _ENGINE_FILE_SUFFIXES)


def find_text_graph(spec: GraphSpec, cache_dir: Path | None) -> TextGraph | None:
    """Return the text model that the graph consists of; None for any other graph. Reads the disk."""
    from ovmstrio.graphs.text_graphs import read_text_graph  # noqa: PLC0415 - imported when first needed

    try:
        content = read_regular_bytes(spec.graph_path)
    except (OSError, ValueError):
        return None
    return read_text_graph(spec, cache_dir) if _TEXT_MODEL.search(content) else None


def _served_spec(spec: GraphSpec, file: ConfigFile) -> ServableSpec:
    found = find_text_graph(spec, file.cache_dir)
    if found is None:
        return spec.model_copy(update={"cache_dir": file.cache_dir})
    file.findings.problems += found.warnings
    # A change of the graph file triggers a reload of the configuration.
    file.subconfigs.contents[spec.graph_path] = found.content
    return found.spec


@lru_cache(maxsize=64)
def _session_calls(content: bytes, file: str) -> tuple[Dependency, ...]:
    """Return the servables that a graph file calls; none if it cannot be parsed."""
    if b"servable_name" not in content:
        return ()
    from ovmstrio.graphs.calculators.inference import find_session_calls  # noqa: PLC0415 - as in `load`

    try:
        return tuple(find_session_calls(content.decode(), file))
    except (UnicodeDecodeError, ServerError):
        return ()


# Graphs of one text model, served as that model


@lru_cache(maxsize=64)
def _model_paths(content: bytes, directory: Path) -> tuple[Path, ...]:
    from ovmstrio.graphs.text_graphs import text_model_paths  # noqa: PLC0415 - imported when first needed

    return text_model_paths(content.decode(errors="replace"), directory)
